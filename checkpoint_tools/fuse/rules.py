r"""Rules: fused tensors and their parts, as data.

A rule names the fused tensor and its parts by templates. ``{name}`` stands for any text, ``{name:regex}`` for text that
matches. The parts have the placeholders of the fused tensor, so a rule works in both directions::

    fused = "{prefix}.mlp.gate_up_proj{suffix:\\.weight|\\.bias}"
    parts = ["{prefix}.mlp.gate_proj{suffix}", "{prefix}.mlp.up_proj{suffix}"]

Rules come from Python (:class:`Rule`), from a TOML or JSON file (:func:`load_rules`) or from :func:`preset`.
"""

import ast
import dataclasses
import functools
import json
import math
import operator
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ..core.regions import Comb, Layout, Shape, combs_of
from ..core.text import CheckpointError, is_excluded, shortened
from .presets import preset_names, preset_text

Size = int | str
_MOST_PARTS = 65_536  # of one tensor, such as experts


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule for one kind of fused tensor.

    Attributes:
        fused: template of the fused tensor's key; it has to match the whole FQN.
        parts: templates of the parts' keys, in the order in which the parts lie in the fused tensor.
        sizes: size of each part along ``dim``, summed over all groups: ``"equal"``, or for each part a number or an
            expression of config values such as ``"num_heads * head_dim"``. One size may be ``"rest"``.
        dim: the fused dimension; negative counts from the last.
        layout: ``"concatenated"``: one part after the other; ``"interleaved"``: one index of each part in turns;
            ``"grouped"``: for each tensor-parallel rank or group of heads, its share of all parts; ``"stacked"``: one
            index for each part, along a dimension that the parts do not have.
        groups: number of ranks or groups of the layout ``"grouped"``: a number or an expression.
        same_size_as: ``(template, dim)`` of another tensor. Its size along ``dim`` must be the first part's size. If it
            is the size of the whole tensor (``linear_fc1`` of an MLP without a gate), the tensor is left unsplit.
        each: expression for the number of indices of a stack; ``{each}`` in ``parts`` stands for each index.
        optional: whether a model may lack such a tensor. If all rules are optional, at least one must match.
        only: patterns of keys, as in a shell (``*``, ``?``, ``[...]``): the rule covers only these.
        exclude: patterns of keys that the rule does not cover.
        source: the code that defines the layout.

    Raises:
        ValueError: the rule contradicts itself.
    """

    fused: str
    parts: tuple[str, ...]
    sizes: str | tuple[Size, ...] = "equal"
    dim: int = 0
    layout: Layout = "concatenated"
    groups: Size = 1
    same_size_as: tuple[str, int] | None = None
    each: str = ""
    optional: bool = False
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for fields_of, is_right, what in _FIELD_CHECKS:  # a file may have a string where a list belongs
            for name in fields_of.split():
                if not is_right(getattr(self, name)):
                    raise CheckpointError(f"rule for {self.fused}: {name} must be {what}, got {getattr(self, name)!r}")
        names = {*template_pattern(self.fused).groupindex, *["each"] * bool(self.each)}
        others = [part for part in self.parts if set(template_pattern(part).groupindex) != names]
        has_sizes = self.sizes != "equal"
        is_alike = not isinstance(self.sizes, str) and len(self.sizes) == len(self.parts)
        for is_wrong, text in (
            (not self.parts, "expected at least one part, got none"),
            (self.layout not in get_args(Layout), f"layout must be one of {get_args(Layout)}, got {self.layout!r}"),
            (
                self.groups != 1 and self.layout != "grouped",
                f"groups are of the layout 'grouped', not of {self.layout!r}",
            ),
            (has_sizes and not is_alike, f"expected 'equal' or {len(self.parts)} sizes, got {self.sizes!r}"),
            (
                self.layout == "stacked" and (has_sizes or self.same_size_as is not None),
                "stacked parts have no sizes; leave out sizes and same_size_as",
            ),
            (others, f"the part {others[:1]} has other placeholders than {sorted(names)}"),
        ):
            if is_wrong:
                raise CheckpointError(f"rule for {self.fused}: {text}")

    def expanded(self, values: Mapping[str, float]) -> "Rule":
        """Return the rule with ``{each}`` in its parts replaced by 0, 1, ...; ``each`` evaluates to their number."""
        count = evaluated(self.each, values, f"{self.fused}, and how many parts it has") if self.each else 0
        if count > _MOST_PARTS:  # a config.json may have any number
            raise CheckpointError(f"{self.each} is {count:,}, and a tensor has at most {_MOST_PARTS:,} parts")
        parts = (part.replace("{each}", str(at)) for part in self.parts for at in range(count))
        return dataclasses.replace(self, parts=tuple(parts), each="") if self.each else self

    @property
    def is_bounded(self) -> bool:
        """Tell whether matching is fast for every key, so that a rule from an untrusted file is safe to use."""
        templates = [self.fused, *self.parts, *(self.same_size_as or ())[:1]]
        regexes = [[found.group(2) or "" for found in _PLACEHOLDER.finditer(str(each))] for each in templates]
        return (
            max(map(len, map(str, templates))) <= _MAX_TEMPLATE
            and max(map(len, regexes)) <= _MAX_PLACEHOLDERS
            and all(_SIMPLE.fullmatch(one) for each in regexes for regex in each for one in regex.split("|"))
        )

    @property
    def value_names(self) -> frozenset[str]:
        """Return the config values named in ``sizes``, ``groups`` and ``each``, even in expressions with errors."""
        own = () if self.sizes == "equal" else self.sizes
        expressions = [size for size in (*own, self.groups, self.each) if isinstance(size, str) and size != "rest"]
        return frozenset(name for text in expressions for name in re.findall(r"\b[^\W\d]\w*", text))

    def dim_of(self, shape: Sequence[int], where: str) -> int:
        """Return the fused dimension of a tensor of ``shape``, counted from the first."""
        dim = self.dim + (len(shape) if self.dim < 0 else 0)
        if not 0 <= dim < len(shape):
            raise CheckpointError(f"{where} has shape {tuple(shape)}, and the rule divides dimension {self.dim}")
        if self.layout == "stacked" and len(shape) == 1:
            raise CheckpointError(f"{where} has shape {tuple(shape)}: nothing is left of a stack of numbers without it")
        return dim

    def match(self, key: str) -> "Match | None":
        """Match ``key`` as a fused tensor; None if the rule does not cover it."""
        found = template_pattern(self.fused).fullmatch(key) if len(key) <= MAX_KEY else None
        if found is None or is_excluded(key, self.exclude) or (self.only and not is_excluded(key, self.only)):
            return None
        texts = found.groupdict()
        return Match(self, key, tuple(template_filled(part, texts) for part in self.parts), texts)

    def match_part(self, key: str, number: int = 0) -> "Match | None":
        """Match ``key`` as part ``number`` of a fused tensor; None if the rule does not cover that tensor."""
        # Give the part's placeholders the regular expressions of the fused template.
        written = {found.group(1): found.group(0) for found in _PLACEHOLDER.finditer(self.fused)}
        typed = _PLACEHOLDER.sub(lambda found: written[found.group(1)], self.parts[number])
        found = template_pattern(typed).fullmatch(key) if len(key) <= MAX_KEY else None
        return None if found is None else self.match(template_filled(self.fused, found.groupdict()))

    def combs(self, fused_size: int, values: Mapping[str, float], where: str) -> tuple[Comb, ...]:
        """Return the comb of each part along the fused dimension, from config values."""
        if DENSE_RANKS in values:  # Megatron's default: as many ranks for experts as for dense layers
            values = {EXPERT_RANKS: values[DENSE_RANKS], **values}
        groups, sizes = evaluated(self.groups, values, where), self.part_sizes(fused_size, values, where)
        if groups < 1:
            raise CheckpointError(
                f"{where}: {self.groups} is {groups}; expected 1 or more, as many as it was divided into"
            )
        try:
            return combs_of(sizes, self.layout, groups)
        except ValueError as error:
            given = f": {self.groups} is {groups}; give as many as it was divided into, or exclude it"
            raise CheckpointError(f"{where}: {error}{given if self.layout == 'grouped' else ''}") from None

    def part_sizes(self, fused_size: int, values: Mapping[str, float], where: str) -> list[int]:
        """Return the parts' sizes along the fused dimension, over all groups."""
        count = len(self.parts)
        if self.layout == "stacked":
            sizes = [1] * count
        elif self.sizes == "equal":
            if fused_size % count:
                raise CheckpointError(
                    f"{where}: dimension {self.dim} of size {fused_size} has no {count} equal parts. Exclude it"
                )
            sizes = [fused_size // count] * count
        else:
            known = [None if size == "rest" else evaluated(size, values, where) for size in self.sizes]
            rest = fused_size - sum(size for size in known if size is not None)
            sizes = [rest if size is None else size for size in known]
        if sum(sizes) != fused_size or min(sizes) < 0:
            raise CheckpointError(
                f"{where}: its parts have sizes {sizes}, {sum(sizes)} together, but its dimension {self.dim} has "
                f"{fused_size}. Is it fused as the rule for {self.fused} says?"
            )
        return sizes


DENSE_RANKS, EXPERT_RANKS = "tp_size", "etp_size"
"""Config values: the numbers of tensor-parallel ranks of dense layers and of experts."""


class Match(NamedTuple):
    """A fused tensor and its parts; ``texts``: the values of the placeholders."""

    rule: Rule
    fused: str
    parts: tuple[str, ...]
    texts: dict[str, str]

    def is_whole(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Tell whether nothing is fused (an MLP without a gate): ``same_size_as`` has the whole tensor's size."""
        if self.rule.same_size_as is None:
            return False
        (template, at), dim = self.rule.same_size_as, self.rule.dim
        own, other = shapes.get(self.fused, ()), shapes.get(template_filled(template, self.texts), ())
        has_size = -len(own) <= dim < len(own) and -len(other) <= at < len(other) and own[dim] == other[at] > 0
        # If experts are stacked the other way (transposed), both sizes are the hidden size: compare numels as well.
        return has_size and (len(own) < 3 or math.prod(own) == math.prod(other))

    def divided(
        self, shape: Shape, values: Mapping[str, float], siblings: Mapping[str, Sequence[int]]
    ) -> tuple[int, tuple[Comb, ...]]:
        """Return the fused dimension of a tensor of ``shape``, and the comb of each part along it.

        Raise if the first part's size, summed over all groups, is not that of the tensor of ``same_size_as``.
        """
        dim = self.rule.dim_of(shape, self.fused)
        if self.rule.same_size_as is not None:
            template, at = self.rule.same_size_as
            sibling = template_filled(template, self.texts)
            if sibling not in siblings:
                raise CheckpointError(
                    f"{self.fused}: whether it is fused can be told from {sibling}, which is not there. Exclude it, or "
                    "give a rule without same_size_as if you know"
                )
            other = siblings[sibling]
            if not -len(other) <= at < len(other):
                raise CheckpointError(f"{self.fused}: expected {sibling} to have a dimension {at}, got {other}")
            first_size = self.rule.part_sizes(shape[dim], values, self.fused)[0]
            if other[at] != first_size:
                raise CheckpointError(
                    f"{self.fused} is not fused as the rule says: its first part would have size {first_size}, but "
                    f"{sibling} takes {other[at]}. Exclude it"
                )
        return dim, self.rule.combs(shape[dim], values, self.fused)

    def joined(
        self, shapes: Sequence[Shape], values: Mapping[str, float], where: str
    ) -> tuple[Shape, int, tuple[Comb, ...]]:
        """Return the layout of the fused tensor of parts with these ``shapes``: shape, fused dimension, and combs."""
        first, stacked = shapes[0], self.rule.layout == "stacked"
        dim = self.rule.dim_of((1,) * (len(first) + stacked), where)
        if any(len(shape) != len(first) for shape in shapes):
            raise CheckpointError(f"{where} cannot be merged: its parts have the shapes {list(shapes)}")
        size = len(shapes) if stacked else sum(shape[dim] for shape in shapes)
        fused = (*first[:dim], size, *first[dim + (not stacked) :])
        combs = self.rule.combs(size, values, where)
        expected = [comb.part_shape(fused, dim) for comb in combs]
        if list(shapes) != expected:
            raise CheckpointError(
                f"{where}: the rule gives its parts the shapes {expected}, and they have {list(shapes)}"
            )
        return fused, dim, combs


Wanted = Callable[[Match], bool]
"""Predicate that selects the matches to exchange; fused tensors and parts of other matches stay."""

ALL: Wanted = lambda match: True  # noqa: E731


def excluding(rules: Iterable[Rule], *patterns: str) -> tuple[Rule, ...]:
    """Return rules that skip keys that match a pattern: ``excluding(preset(...), "vision_model.*")``."""
    given = rules if isinstance(rules, Sequence) else list(rules)
    if not all(isinstance(rule, Rule) for rule in given):
        line = "excluding(preset('hf-gate-up'), 'vision_model.*')"
        raise TypeError(f"excluding: expected rules first, got {given!r:.60}. Write {line}.")
    return tuple(dataclasses.replace(rule, exclude=(*rule.exclude, *patterns)) for rule in given)


Way = Literal["split", "merge"]


def match_of(way: Way, rule: Rule, key: str) -> Match | None:
    """Match a key by a rule: to split, as the fused tensor; to merge, as its first part."""
    return rule.match(key) if way == "split" else rule.match_part(key)


def find_matches(way: Way, keys: Iterable[str], rules: Sequence[Rule], wanted: Wanted = ALL) -> list[Match]:
    """Find the wanted matches: to split, of fused tensors among ``keys``; to merge, of all parts among ``keys``."""
    known = dict.fromkeys(keys)
    matches: list[Match] = []
    for key in known:
        found = [match for rule in rules if (match := match_of(way, rule, key)) and wanted(match)]
        if len(found) > 1:
            raise CheckpointError(
                f"{key} is matched by several rules: {', '.join(match.rule.fused for match in found)}"
            )
        matches += found
    parts = Counter(part for match in matches for part in match.parts)
    taken = sorted(part for part, count in parts.items() if count > 1 or (way == "split" and part in known))
    if taken:
        raise CheckpointError(f"part names are taken already: {', '.join(taken[:5])}")
    if way == "split":
        return matches
    used: set[str] = set()
    for match in matches:
        missing = [part for part in match.parts if part not in known]
        if missing or match.fused in known:
            why = f"{missing} missing" if missing else "it is there already"
            raise CheckpointError(f"{match.fused} cannot be merged: {why}")
        used.update(match.parts)
    left = [key for key in known if key not in used]
    active = [rule for rule in rules if any(match.rule is rule for match in matches)]
    for rule, number in ((each, number) for each in active for number in range(1, len(each.parts))):
        for key in left:
            alone = rule.match_part(key, number)
            if alone is not None and wanted(alone):
                raise CheckpointError(
                    f"{key} cannot be merged into {alone.fused}: {alone.parts[0]} is missing. Exclude it, if it is no "
                    "part of anything"
                )
    return matches


# Files and presets ---------------------------------------------------------------------------------------------------


def load_rules(path: str | Path) -> tuple[Rule, ...]:
    """Load rules from a file: ``[[rule]]`` tables in TOML or ``{"rule": [{...}]}`` in JSON, with fields of ``Rule``.

    Raises:
        ValueError: the file does not define rules; the message names the field.
        OSError: the file cannot be read.
    """
    return rules_of(tables_in(path), str(path))


def tables_in(path: str | Path) -> Any:
    """Read a TOML file, or a JSON file if its suffix is ``.json``."""
    is_json = str(path).endswith(".json")
    try:
        return (json.loads if is_json else tomllib.loads)(Path(path).read_text(encoding="utf-8"))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path!s:.200} is no {'JSON' if is_json else 'TOML'}: {error}") from None


def presets_for(way: Way, keys: Iterable[str]) -> str:
    """Return a sentence on presets that match some of ``keys``: fused tensors to split, or all parts to merge."""
    known, found = frozenset(keys), []
    for name in preset_names():
        rules = [rule.expanded({rule.each: 2}) for rule in preset(name)]
        matches = filter(None, (match_of(way, rule, key) for rule in rules for key in known))
        if any(way == "split" or known.issuperset(match.parts) for match in matches):
            found.append(name)
    names = ", ".join(found or preset_names())
    return f"presets that match its keys: {names}" if found else f"no preset matches its keys ({names})"


def preset(name: str) -> tuple[Rule, ...]:
    """Return the rules of a framework by name; ValueError, with all names, if there is no such preset."""
    if name not in preset_names():
        raise CheckpointError(f"no preset {name!r}; there are {', '.join(preset_names())}")
    return rules_of(tomllib.loads(preset_text(name)), name)


def rules_of(data: Any, where: str) -> tuple[Rule, ...]:
    """Return the rules of a parsed file."""
    tables = data.get("rule") if isinstance(data, dict) else None
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise CheckpointError(f'{where}: expected [[rule]] tables, or {{"rule": [{{...}}]}} in JSON')
    frozen = [{name: _frozen(value) for name, value in table.items()} for table in tables]
    try:
        return tuple(Rule(**table) for table in frozen)
    except (TypeError, ValueError) as error:  # a field is missing, or unknown
        raise CheckpointError(f"{where}: {str(error).replace('Rule.__init__()', 'a rule is')}") from None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _are(value: object, *types: type) -> bool:
    return isinstance(value, tuple) and all(type(each) in types for each in value)


_FIELD_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("fused layout source each", lambda value: type(value) is str, "a string"),
    ("parts only exclude", lambda value: _are(value, str), "a list of strings"),
    ("sizes", lambda v: type(v) is str or _are(v, str, int), '"equal", or a list of numbers and expressions'),
    ("groups", lambda value: type(value) in (str, int), "a number or an expression"),
    ("dim", lambda value: type(value) is int, "a number"),
    ("optional", lambda value: type(value) is bool, "true or false"),
    (
        "same_size_as",
        lambda v: v is None or (isinstance(v, tuple) and [type(each) for each in v] == [str, int]),
        "a template and a dimension",
    ),
)


# Templates -----------------------------------------------------------------------------------------------------------

MAX_KEY = 1024
"""Longest key that a rule matches, in characters; no model has longer keys."""

_MAX_TEMPLATE = 256  # characters
_MAX_PLACEHOLDERS = 2  # in an untrusted template: matching takes about len(key) ** placeholders
_WORD = r"([\w-]|\\\.)*"
_SIMPLE = re.compile(rf"(\.\*(\(\?<!{_WORD}\))?)?{_WORD}|{_WORD}\\d[*+]?")  # a word, after any text or before digits

_PLACEHOLDER = re.compile(r"\{(\w+)(?::((?:[^{}]|\{\d+(?:,\d*)?\})*))?\}")


@functools.cache
def template_pattern(template: str) -> re.Pattern[str]:
    """Compile a template to a regular expression with a named group for each placeholder."""
    if set("{}") & set(_PLACEHOLDER.sub("", template)):
        raise CheckpointError(f"{template}: expected placeholders such as {{name}} or {{name:regex}}")
    pattern, at = "", 0
    for found in _PLACEHOLDER.finditer(template):
        name, regex = found.groups()
        pattern += re.escape(template[at : found.start()]) + f"(?P<{name}>{regex if regex is not None else '.*'})"
        at = found.end()
    try:
        return re.compile(pattern + re.escape(template[at:]))
    except re.error as error:
        raise CheckpointError(f"{template}: a placeholder cannot be used: {error}") from None


def template_filled(template: str, texts: Mapping[str, str]) -> str:
    """Fill a template's placeholders."""
    return _PLACEHOLDER.sub(lambda found: texts[found.group(1)], template)


# Expressions ---------------------------------------------------------------------------------------------------------

_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}


def evaluated(size: Size, values: Mapping[str, float], where: str) -> int:
    """Evaluate a number or an expression of config values; raise a CheckpointError if the result is no whole number."""
    # No layout needs a longer expression, and Python's parser fails on very long ones.
    if isinstance(size, str) and len(size) > _MAX_TEMPLATE:
        raise CheckpointError(
            f"{where}: the size {shortened(size)!r} has {len(size):,} letters, of at most {_MAX_TEMPLATE}"
        )
    try:
        result = _value(ast.parse(size, mode="eval").body, values) if isinstance(size, str) else size
        is_whole = math.isfinite(result) and result == int(result)
    except KeyError as error:
        name, given = error.args[0], ", ".join(sorted(values)) or "none"
        raise CheckpointError(
            f"{where}: the size {size!r} needs the config value {name!r}; give it with --value {name}=NUMBER, or "
            f"values={{{name!r}: ...}}. Given are: {given}"
        ) from None
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError, OverflowError, MemoryError, RecursionError) as error:
        raise CheckpointError(f"{where}: the size {size!r} cannot be evaluated: {error}") from None
    if not is_whole:
        raise CheckpointError(f"{where}: the size {size!r} is {result}, not a whole number")
    return int(result)


def _value(node: ast.expr, values: Mapping[str, float]) -> float:
    """Evaluate ``+ - * / //`` of numbers and names; raise for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name):
        value = values[node.id]
        if not isinstance(value, int | float):
            raise TypeError(f"{node.id} is {value!r}")
        return value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: float = _OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
        return result
    raise TypeError(f"only + - * / // of numbers and config values are allowed, not {ast.unparse(node)!r}")
