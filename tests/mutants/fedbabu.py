"""Mistakes in fedbabu.py, and what notices them."""

import checks
from checks import CLIENTS, against, found, known

BABU, HEAD = against("fedbabu"), against("fedbabu", {"tune_epochs": 2, "tune_part": "head"})
IMAGES, UNTUNED = against("fedbabu", images=True), against("fedbabu", {"tune_epochs": 0})
WEIGHTED = checks.the_server_holds_the_mean_by_samples


def the_head_is_never_trained(kind):
    one = found(kind(tune_epochs=0), weight_decay=0.5)
    head = one.context.net.head
    assert all(one.personal(i).pick(head).equals(head) for i in range(CLIENTS))
    assert not set(one.server["model"]) & set(head)


def its_bodies_are_fedrep_s(kind):
    checks.same_shared(found(kind()), known("fedrep", {"head_epochs": 0}))


MUTANTS = [
    ("head, only=body)", "head)", BABU),
    ("head, only=body)", "head)", its_bodies_are_fedrep_s),
    ("head, only=body)", "head, only=head)", BABU),  # reversed, as other papers describe it
    # the head gets a gradient of 0, as in public code: weight decay moves it
    (
        "w = me.train(body | head, only=body)\n        return Up(mean={\"model\": w.pick(body)}), mine",
        "zero = lambda g, w: g | g.pick(head).zeros()\n        w = me.train(body | head, correct=zero)\n"
        "        return Up(mean={\"model\": w.pick(body)}), {\"model\": w.pick(head)}",
        the_head_is_never_trained,
    ),
    ("w.pick(body)}), mine", 'w.pick(body)}), {"model": me.train(w, only=head).pick(head)}', the_head_is_never_trained),
    ('mean={"model": w.pick(body)})', 'mean={"model": w.pick(body)}, weight=1)', BABU),
    ('mean={"model": w.pick(body)})', 'mean={"model": w.pick(body)}, weight=1)', WEIGHTED),
    ('mean={"model": w.pick(body)}', 'mean={"model": body}', BABU),
    ('if self.tune_part == "head" else', 'if self.tune_part != "head" else', HEAD),
    ("only=only, ", "", HEAD),
    ("only=only, ", "only=body, ", BABU),
    ("epochs=self.tune_epochs, ", "", BABU),
    ("epochs=self.tune_epochs", "epochs=max(1, self.tune_epochs)", UNTUNED),
    ("order=8", "order=0", BABU),
    ("return me.train(body | head,", "return me.train(me.task.net.body | head,", IMAGES),  # a body of long ago
]  # fmt: skip
