"""Errors that speak to the user: what was expected, what was found, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """A mistake that the user can mend. The command line prints its sentence and exits with code 2."""


class ContractError(TypeError):
    """A method broke the contract: a name, shape or dtype is not what `init` declared."""


class ClientError(RuntimeError):
    """A client's own computation failed; the message names method, client and round."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that nobody knows, with the nearest known ones."""
    known = sorted(known)
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else f" Known: {', '.join(known)}."
    return UsageError(f"Unknown {kind} '{name}'.{hint}")


def said(error: BaseException) -> str:
    """What another library's error says, as a part of one sentence."""
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__


def individual(method: str, slots: Iterable[str]) -> UsageError:
    """The error for a secure run of a method whose server has to see replies one by one."""
    return UsageError(
        f"{method} sends what its server has to see client by client (rows: {', '.join(slots)}), which secure "
        "aggregation hides: it shows sums alone. Use a method that sends only sums, such as fedavg "
        "('idiolect methods --json' tells), or secure=false."
    )
