"""Methods by name: what a wrapper is called, and whose field a setting is."""

import pytest

from idiolect import catalogue
from idiolect.errors import UsageError
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.fedrep import FedRep
from idiolect.wrap.fedlag import FedLAG
from idiolect.wrap.finetune import FineTune


@pytest.mark.parametrize(
    ("asked", "name", "made"),
    [
        ("fedavg", "fedavg", FedAvg()),
        ("finetune", "fedavg+finetune", FineTune(FedAvg())),
        ("fedavg+finetune", "fedavg+finetune", FineTune(FedAvg())),
        ("fedrep+fedlag", "fedrep+fedlag", FedLAG(FedRep())),
        ("FedRep+FedLAG+FineTune", "fedrep+fedlag+finetune", FineTune(FedLAG(FedRep()))),
        ("fedlag+finetune", "fedavg+fedlag+finetune", FineTune(FedLAG(FedAvg()))),
    ],
)
def test_a_wrapper_is_named_after_what_it_wraps(asked, name, made):
    assert catalogue.build(asked) == made
    assert made.name == name
    assert catalogue.build(made.name) == made


def test_fields_of_the_outer_and_the_inner_are_set_by_their_names():
    build = catalogue.build
    expected = FedLAG(FedRep(head_epochs=4), top_k=3, threshold=-0.5)
    assert build("fedrep+fedlag", {"fedlag.top_k": "3", "threshold": "-0.5", "fedrep.head_epochs": "4"}) == expected
    assert build("fedrep+fedlag", {"top_k": 3, "fedlag.threshold": -0.5, "head_epochs": 4}) == expected
    assert build("fedlag", {"fedlag.top_k": 3}) == FedLAG(FedAvg(), top_k=3)
    assert build("ditto+finetune", {"lam": 2, "finetune.epochs": 7}).epochs == 7


@pytest.mark.parametrize(
    ("name", "setting", "sentence"),
    [
        ("fedprox+fedlag+finetune", "epoch", "Unknown hyper-parameter of fedprox, fedlag, finetune 'epoch'. Did you mean epochs"),
        ("fedrep+fedlag", "fedlagg.top_k", "Unknown method in --set 'fedlagg'. Did you mean fedlag"),
        ("fedrep+fedlag", "fedrep.top_k", "Unknown hyper-parameter of fedrep 'top_k'."),
        ("fedrep+fedlag", "finetune.epochs", "Unknown method in --set 'finetune'."),
    ],
)  # fmt: skip
def test_a_setting_that_is_nobody_s_is_refused(name, setting, sentence):
    with pytest.raises(UsageError) as error:
        catalogue.build(name, {setting: 1})
    assert sentence in str(error.value)


def test_a_plain_name_that_two_parts_have_is_asked_for_in_full():
    fields = {name: set(catalogue.settings(catalogue.build(name))) for name in catalogue.names()}
    plain = [n for n in fields if not catalogue.wraps(n)]
    wrappers = [n for n in fields if catalogue.wraps(n)]
    shared = [
        (inner, outer, field)
        for outer in wrappers
        for inner in plain
        for field in {f.rpartition(".")[2] for f in fields[inner]} & {f.rpartition(".")[2] for f in fields[outer]}
    ]
    assert shared
    inner, outer, field = shared[0]
    with pytest.raises(UsageError, match=f"write {inner}.{field} or {outer}.{field}"):
        catalogue.build(f"{inner}+{outer}", {field: 1})
