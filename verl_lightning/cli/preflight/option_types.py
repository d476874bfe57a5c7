"""Values that an option allows, as far as they can be told from its annotation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_lightning.cli.preflight.sources import ClassSource

TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")


@dataclass(frozen=True, kw_only=True)
class OptionType:
    """Alternatives for the value of an option, which must fit one of them."""

    is_open: bool = False
    """True if there are alternatives that are not understood, so that no value can be refused."""

    is_null: bool = False
    """True if null is an alternative."""

    scalars: tuple[str, ...] = ()
    """Names of the scalar types allowed, among `int`, `float`, `str` and `bool`."""

    choices: tuple[str, ...] = ()
    """Words allowed, those of a ``Literal``."""

    parts: tuple[ClassSource, ...] = ()
    """Dataclasses allowed, the options of which form a group."""

    bases: tuple[ClassSource, ...] = ()
    """Base classes, a subclass of which is chosen."""

    items: OptionType | None = None
    """Alternatives for the items of a list; None if no list is allowed."""

    @property
    def texts(self) -> list[str]:
        """The simple alternatives as YAML users know them."""
        words = [f"one of {', '.join(map(repr, self.choices))}"] if self.choices else []
        return [*self.scalars, *words, *(["null"] if self.is_null else [])]

    @property
    def is_group(self) -> bool:
        """True if a dataclass is the only alternative, so that its options count as those of the option's owner."""
        return len(self.parts) == 1 and self == OptionType(parts=self.parts)

    @property
    def is_simple(self) -> bool:
        """True if all alternatives are scalars, words and null."""
        return not (self.is_open or self.parts or self.bases or self.items)

    @property
    def choice(self) -> OptionType | None:
        """The alternative that is a class, alone or in a list; None if there is none."""
        if self.bases:
            return self
        return None if self.items is None else self.items.choice

    @property
    def takes_words(self) -> bool:
        """True if a word may be something else than the name of a class, which a text is beside classes of ours."""
        names_class = bool(self.bases) and all(base.is_ours for base in self.bases)
        return self.is_open or bool(self.choices) or ("str" in self.scalars and not names_class)

    def takes(self, value: Any) -> bool:
        """Tells whether a value may fit; False only for one that no simple alternative can be."""
        if value is None or not self.is_simple or isinstance(value, dict | list) or "str" in self.scalars:
            return True
        text = str(value)
        is_word = text in self.choices or ("bool" in self.scalars and text.lower() in TRUTHS)
        return is_word or (bool({"int", "float"} & set(self.scalars)) and is_number(text))


ANYTHING = OptionType(is_open=True)
NULL = OptionType(is_null=True)


def join(types: Sequence[OptionType]) -> OptionType:
    """Joins the alternatives of several types into one type."""
    lists = [part.items for part in types if part.items is not None]
    return OptionType(
        is_open=any(part.is_open for part in types),
        is_null=any(part.is_null for part in types),
        scalars=tuple(name for part in types for name in part.scalars),
        choices=tuple(word for part in types for word in part.choices),
        parts=tuple(cls for part in types for cls in part.parts),
        bases=tuple(cls for part in types for cls in part.bases),
        items=lists[0] if len(lists) == 1 else ANYTHING if lists else None,
    )


def is_number(text: str) -> bool:
    """Tells whether a text reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
