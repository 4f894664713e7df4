"""Networks for text that comes as token ids."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from idiolect.nets.network import Network
from idiolect.nets.refusals import UnfitError, positive

PADDING = 0


def fasttext(shape: tuple[int, ...], classes: int, vocabulary: int = 98_635, dim: int = 32) -> Network:
    """Mean of the embeddings of the token ids (0 is padding), a linear hidden layer, linear.

    FedAH names fastText (Joulin et al., 2017) for AG News and gives no sizes. PFLlib, whose settings it
    shares, embeds 98,635 ids in 32 dimensions and puts a hidden linear layer of 32 without activation
    before the classifier: the defaults.
    `vocabulary` is the number of ids, padding included: every id must be below it. A run sets it to the number that its
    training rows have.
    Departs from PFLlib: the mean leaves the padding out, so that a text's feature does not depend on the
    length to which it was padded; a text of padding alone has the mean 0.
    """
    positive("fasttext", vocabulary=vocabulary, dim=dim)
    if len(shape) != 1:
        raise UnfitError(f"fasttext needs token ids (length,), found samples of shape {shape}.")
    body: OrderedDict[str, nn.Module] = OrderedDict(
        embedding=MeanEmbedding(vocabulary, dim), hidden=nn.Linear(dim, dim)
    )
    return Network(nn.Sequential(body), nn.Linear(dim, classes))


def nplm(shape: tuple[int, ...], classes: int, vocabulary: int = 256, dim: int = 16, hidden: int = 128) -> Network:
    """Embeddings of the token ids in their order, a tanh layer of `hidden` on all of them, linear.

    The neural probabilistic language model (Bengio et al., 2003, without its direct connections), which predicts the
    next token; the sizes are chosen for characters. `vocabulary` is the number of ids, as in fasttext.
    """
    positive("nplm", vocabulary=vocabulary, dim=dim, hidden=hidden)
    if len(shape) != 1:
        raise UnfitError(f"nplm needs token ids (length,), found samples of shape {shape}.")
    layer: OrderedDict[str, nn.Module] = OrderedDict(linear=nn.Linear(shape[0] * dim, hidden), tanh=nn.Tanh())
    body: OrderedDict[str, nn.Module] = OrderedDict(
        embedding=nn.Embedding(vocabulary, dim), flatten=nn.Flatten(), hidden=nn.Sequential(layer)
    )
    return Network(nn.Sequential(body), nn.Linear(hidden, classes))


class MeanEmbedding(nn.Module):
    """The mean of the embeddings of the tokens that are not padding."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, dim)

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.table(ids)  # [B, L, dim]
        real = (ids != PADDING).unsqueeze(-1).to(embedded.dtype)  # [B, L, 1]
        return (embedded * real).sum(1) / real.sum(1).clamp(min=1)


NETWORKS = {"fasttext": fasttext, "nplm": nplm}
