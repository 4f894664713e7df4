"""Mistakes in fedexp.py, and what notices them."""

from checks import against

EXP, IMAGES = against("fedexp"), against("fedexp", images=True)
SAMPLES, ITERATE = against("fedexp", {"weights": "samples", "eps": 0.002}), against("fedexp", {"average_last": False})

MUTANTS = [
    ("square / below", "below / square", EXP),
    ("2 * (mean", "(mean", EXP),
    (".clamp(min=1.0)", ".clamp(max=1.0)", EXP),
    ("x.lerp(y, eta)", "y.pick(x)", EXP),
    ("x.lerp(y, eta)", "y.pick(x).lerp(x, eta)", EXP),
    ('1.0 if self.weights == "uniform" else None', 'None if self.weights == "uniform" else 1.0', SAMPLES),
    ('1.0 if self.weights == "uniform" else None', "None", EXP),
    ('participants if self.weights == "samples" else 1', "1", SAMPLES),
    ("len(run.ids)", "run.num_clients", SAMPLES),
    ("y | x.lerp(y, eta)", "before.lerp(y, eta)", IMAGES),
    (".drop(me.task.net.buffers)", "", IMAGES),
    ('"previous": x,', '"previous": server["previous"],', EXP),
    ('"statistics": before.drop(x)', '"statistics": server["statistics"]', IMAGES),
    ("lerp(before, 0.5)", "lerp(before, 1.0)", EXP),
    ("if not self.average_last", "if self.average_last", ITERATE),
]
