"""The errors a user can cause. Each message is one line that names what is wrong, where, and what is allowed."""

from collections.abc import Iterable


class ApexSimError(Exception):
    """A user's mistake or a damaged input: reported as one line, exit status 1."""


class UsageError(ApexSimError):
    """A command line or argument that does not fit: reported as one line, exit status 2."""


class BundleError(ApexSimError):
    """A trace bundle that is damaged, incomplete or out of range."""


class ImportFormatError(ApexSimError):
    """A public trace file that does not have the format it was said to have."""


class ProfileError(ApexSimError):
    """A cost profile that is unknown, damaged, or does not price what is asked of it."""


class PolicyError(ApexSimError):
    """A policy that is unknown or cannot be replayed on the trace it was asked for."""


def choices(allowed: Iterable[object]) -> str:
    """Formats the allowed values of an option for an error message."""
    return ", ".join(str(value) for value in allowed) or "none"
