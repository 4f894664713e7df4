"""Mistakes in fedphp.py, and what notices them."""

from checks import against

PHP, IMAGES = against("fedphp", {"lam": 0.4}), against("fedphp", {"lam": 0.4}, images=True)
KD, KD_IMAGES = against("fedphp", {"transfer": "kd"}), against("fedphp", {"transfer": "kd"}, images=True)
OFTEN = against("fedphp", {"expected": 1.0, "mu": 0.6})

MUTANTS = [
    ("(1 - self.lam) * ", "", PHP),
    ("+ self.lam * taught", "- self.lam * taught", PHP),
    ("+ self.lam * taught", "+ 0.0 * taught", KD),
    ("lam: float = 0.05", "lam: float = 1e-9", KD),
    ("batch.beside / self.temperature", "batch.beside", KD),
    ("torch.log_softmax(logits, dim=1)", "torch.log_softmax(logits / self.temperature, dim=1)", KD),
    ("batch.mean(-(soft", "batch.mean((soft", KD),
    ('w = me.train(down["model"], loss', "w = me.train(q, loss", PHP),
    ('w = me.train(down["model"], loss', 'w = me.train(down["model"].lerp(q, 0.5), loss', PHP),  # an older public code
    ("me.features(q) if", 'me.features(down["model"]) if', PHP),  # the same
    ("else me.logits(q)", 'else me.logits(down["model"])', KD_IMAGES),
    ("w.lerp(q, mu)", "w", PHP),
    ("w.lerp(q, mu)", "q.lerp(w, mu)", PHP),
    ('{"model": w.lerp(q, mu)}', "mine", PHP),  # the initial model is evaluated
    ('mean={"model": w}', 'mean={"model": w.lerp(q, 0.1)}', PHP),
    ("me.visits /", "me.round /", OFTEN),  # public code: the server's rounds
    ("me.visits /", "(me.visits + 1) /", PHP),
    ("self.mu * min(1.0, me.visits", "min(self.mu, me.visits", PHP),
    ("max(1.0, float", "max(2.0, float", OFTEN),
    ("run.rounds * len(run.ids)", "run.rounds", PHP),
    ("run.rounds * len(run.ids) / run.num_clients", "run.rounds", PHP),
    ("(m * (m - 1))", "(m * m)", IMAGES),
    ("-d / (2.0**k * h)", "-d / (2.0 * k * k * h + h)", PHP),
    ("range(-2, 3)", "range(-1, 2)", PHP),
    ("-real[len(s) :]", "real[len(s) :]", PHP),
    ("d.detach()", "d", PHP),
]
