"""Mistakes in fedfomo.py, and what notices them."""

from checks import against

FOMO, IMAGES = against("fedfomo"), against("fedfomo", images=True)
GREEDY = against("fedfomo", {"explore": 0.0, "models": 3})
PAIRS, OLD = (
    against("fedfomo", {"models": 2, "fallback": fallback}, ratio=1.0, rounds=8) for fallback in ("own", "old")
)
FADING = against("fedfomo", {"models": 2, "explore": 1.0, "explore_decay": 0.3}, ratio=1.0, rounds=6)
EMPTY = against("fedfomo", {"models": 8}, ratio="bernoulli:0.3", rounds=9)

MUTANTS = [
    ("draw.random() < self.explore", "0.0 > self.explore", FOMO),  # public code: no exploration
    ("- self.explore_decay * run.round", "", FADING),
    ("key=lambda k: -float", "key=lambda k: float", GREEDY),
    ("order.sort(", "others.sort(", GREEDY),
    ('self.chosen(i, ids, rows[i]["liked"], run)', "self.chosen(i, ids, Tree(), run)", GREEDY),
    ("torch.zeros_like(gain)) + gain", "torch.zeros_like(gain)) - gain", GREEDY),
    ("if other != i", "", FOMO),
    ('if server["round"] == run.round and server["ids"]', 'if server["ids"]', EMPTY),
    ("order[: self.models - 1]", "order[: max(1, self.models - 2)]", GREEDY),
    ("own, held = me.split", "held, own = me.split", FOMO),
    ("own, held = me.split(self.share)", "own, held = me, me.split(self.share)[1]", FOMO),
    ("w = own.train(start)", "w = me.train(start)", FOMO),  # what is held out is trained on
    ('self.gains(held, candidates, mine["old"])', 'self.gains(held, candidates, mine["model"])', FOMO),  # public code
    ('[mine["model"], *', '[mine["old"], *', FOMO),
    ('"old": start}', '"old": mine["old"]}', FOMO),
    ('"old": start}', '"old": mine["model"]}', FOMO),
    ("(lower / far)", "lower", FOMO),
    ("(lower / far)", "(lower / far.square())", FOMO),
    (".drop(held.task.net.buffers)", "", IMAGES),
    ("gains.clamp(min=0)", "gains.abs()", FOMO),
    ("share = helps / helps.sum()", "share = helps.sign() / helps.sign().sum()", FOMO),
    ('if self.fallback == "own" else old', 'if self.fallback != "own" else old', PAIRS),
    ('if self.fallback == "own" else old', 'if self.fallback == "own" else candidates[0]', OLD),
]
