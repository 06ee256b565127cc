"""Reads how many GPUs have engines that prefill, and how many engines that decode."""

from dataclasses import dataclass
from typing import Final

_FORM: Final = "write prefill=GPUS,decode=GPUS, as prefill=2,decode=6, or leave roles out"


@dataclass(frozen=True, slots=True)
class RoleGpus:
    """GPUs of the engines of each role."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        """As in a configuration."""
        return f"prefill={self.prefill},decode={self.decode}"

    @property
    def label(self) -> str:
        """In names of rows: ``p2d6``."""
        return f"p{self.prefill}d{self.decode}"


def roles_of(text: str) -> RoleGpus | None:
    """Read GPUs by role; None where the text is empty: every engine prefills and decodes.

    Raises:
        ValueError: a role is unknown, twice there or without the other, or has no GPUs.
    """
    if not text.strip():
        return None
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, equals, number = (word.strip() for word in part.partition("="))
        if role not in ("prefill", "decode") or not equals:
            raise ValueError(f"{part!r} is no role with its GPUs: {_FORM}")
        if role in found:
            raise ValueError(f"two numbers of {role} GPUs: {_FORM}")
        found[role] = int(number) if number.isascii() and number.isdigit() else 0
        if found[role] < 1:
            raise ValueError(f"{part!r} is no number of GPUs from 1 on: {_FORM}")
    if len(found) == 1:
        (role,) = found
        other = "decode" if role == "prefill" else "prefill"
        raise ValueError(
            f"{text!r} has engines that {role} and none that {other} for them: add {other}=GPUS, "
            "or leave roles out, and every engine does both"
        )
    if not found:
        raise ValueError(f"{text!r} names no role: {_FORM}")
    return RoleGpus(found["prefill"], found["decode"])


def check_role_gpus(roles: RoleGpus | None, prefill_each: int) -> None:
    """Check that GPUs divide into prefill engines of `prefill_each` GPUs.

    Raises:
        ValueError: they do not; the message names numbers that do.
    """
    if roles is not None and prefill_each > 0 and roles.prefill % prefill_each:
        raise ValueError(
            f"prefill = {roles.prefill} is not divisible into engines of {prefill_each} GPUs: take "
            f"prefill = {max(roles.prefill // prefill_each, 1) * prefill_each} or another "
            "prefill_tp"
        )
