"""Mistakes in fedpam.py, and what notices them."""

from checks import against

PAM, SHARP = against("fedpam"), against("fedpam", {"lam": 2.0, "tau": 0.2})
FIXED, PLAIN = against("fedpam", {"pam": False, "lam": 3.0}), against("fedpam", {"contrast": False})

MUTANTS = [
    ('w[f"{head}.weight"] @ w["adjust"]', 'w[f"{head}.weight"] @ w["adjust"].T', PAM),
    ("batch.y[:, None] != batch.y", "batch.y[:, None] == batch.y", PAM),
    ("z @ z.T / self.tau", "z @ z.T", SHARP),
    ("z @ anchors.T / self.tau, samples", "z @ anchors.T, samples", SHARP),
    ("torch.cat([z @ anchors.T / self.tau, samples], 1)", "z @ anchors.T / self.tau", PAM),
    ("z, anchors = unit(z), unit(anchors)", "z, anchors = z, unit(anchors)", SHARP),
    ("z, anchors = unit(z), unit(anchors)", "z, anchors = unit(z), anchors", SHARP),
    ("loss + self.lam *", "loss +", SHARP),
    ("loss + self.lam *", "self.lam *", SHARP),
    ("loss + task.criterion(z @ anchors.T, batch)", "loss", PLAIN),
    ("loss + task.criterion(z @ anchors.T, batch)", "loss + self.lam * task.criterion(z @ anchors.T, batch)", PLAIN),
    ("only=model | adjust if self.pam else model", "only=model | adjust", FIXED),
    ("only=model | adjust if self.pam else model", "only=model", PAM),
    ('{"adjust": w.pick(adjust)}', '{"adjust": adjust}', PAM),
    ('down["model"] | mine["adjust"]', 'down["model"] | mine["adjust"].ones()', PAM),
    ("torch.eye(m, dtype", "torch.ones(m, m, dtype", PAM),
]
