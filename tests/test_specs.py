"""Settings as text: what is written is what is read, and what is not known answers with what is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.collectives.double_tree import DoubleTree
from syncline.collectives.flat import FLAT
from syncline.collectives.hierarchical import Hierarchical
from syncline.collectives.registry import ALGORITHMS, algorithm
from syncline.collectives.ring import Ring
from syncline.collectives.tree import Tree
from syncline.errors import ConfigError, UnknownName
from syncline.specs import parse, text_of


@dataclass(frozen=True, kw_only=True)
class Every:
    """A setting of every type."""

    name: ClassVar[str] = "every"

    count: int
    share: float = 0.5
    wanted: bool = False
    label: str = ""
    two_words: int = 1


TABLE = {"every": Every, **ALGORITHMS}


# What is written is read


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_name_alone_is_the_default(name: str) -> None:
    assert algorithm(name) == ALGORITHMS[name]()
    assert text_of(name, ALGORITHMS[name]()) == name


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("tree:4", Tree(arity=4)),
        ("tree:arity=4", Tree(arity=4)),
        ("tree:4,pieces=7", Tree(arity=4, pieces=7)),
        (" tree: pieces = 7 , arity = 3 ", Tree(arity=3, pieces=7)),
        ("double-tree:7", DoubleTree(pieces=7)),
        ("ring:", Ring()),
        ("hierarchical:inner=ring,outer=tree:3", Hierarchical(inner="ring", outer="tree:3")),
        ("hierarchical:sizes=2+3", Hierarchical(sizes="2+3")),
        ("every:3", Every(count=3)),
        ("every:count=3,share=1e-3,wanted=yes", Every(count=3, share=1e-3, wanted=True)),
        ("every:3,wanted=False,label=x=y", Every(count=3, label="x=y")),
        ("every:3,two-words=4", Every(count=3, two_words=4)),
        ("every:label=(a:b=(c:d=1,e=(f,g)),h=2),count=3", Every(count=3, label="a:b=(c:d=1,e=(f,g)),h=2")),
    ],
)
def test_the_grammar(text: str, wanted: object) -> None:
    assert parse("thing", text, TABLE) == wanted


@given(arity=st.integers(1, 10**6), pieces=st.integers(1, 10**6))
def test_trees_are_read_as_they_are_written(arity: int, pieces: int) -> None:
    assert algorithm(text_of("tree", Tree(arity=arity, pieces=pieces))) == Tree(arity=arity, pieces=pieces)


@given(
    st.builds(
        Every,
        count=st.integers(),
        share=st.floats(allow_nan=False),
        wanted=st.booleans(),
        label=st.text("abc:=+.-", max_size=9),
        two_words=st.integers(),
    )
)
def test_every_type_is_read_as_it_is_written(settings: Every) -> None:
    assert parse("thing", text_of("every", settings), TABLE) == settings


FLAT_TEXTS = [*FLAT, "tree:4", "tree:arity=3", "double-tree:pieces=1"]


@pytest.mark.parametrize("outer", FLAT_TEXTS)
@pytest.mark.parametrize("inner", FLAT_TEXTS)
def test_hierarchies_are_read_as_they_are_written(inner: str, outer: str) -> None:
    settings = Hierarchical(inner=inner, outer=outer, sizes="2+3")
    assert algorithm(text_of("hierarchical", settings)) == settings


def test_hierarchies_of_algorithms_with_two_settings_are_read_as_they_are_written() -> None:
    settings = Hierarchical(inner="tree:arity=3,pieces=2", outer="tree:arity=4,pieces=1", sizes="2+3")
    assert algorithm(text_of("hierarchical", settings)) == settings


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_text_is_as_short_as_it_can_be(name: str) -> None:
    for field in fields(ALGORITHMS[name]):
        other = {int: 5, str: "ring" if field.name != "sizes" else "2+2"}[type(field.default)]
        settings = ALGORITHMS[name](**{field.name: other})
        assert text_of(name, settings) in (f"{name}:{field.name}={other}", name if other == field.default else "")


# What is not known


def test_an_unknown_name_answers_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown collective 'halving-double'; did you mean halving-doubling"):
        algorithm("halving-double")


def test_a_name_like_nothing_answers_with_all() -> None:
    with pytest.raises(UnknownName, match=f"known: {', '.join(sorted(ALGORITHMS))}"):
        algorithm("xyzzy")


def test_an_unknown_setting_answers_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown setting of collective tree 'arty'; did you mean arity\?"):
        algorithm("tree:arty=3")


def test_a_setting_of_an_algorithm_without_any_is_refused() -> None:
    for text in ("ring:3", "ring:pieces=3"):
        with pytest.raises(ConfigError):
            algorithm(text)


def test_a_second_value_needs_its_key() -> None:
    with pytest.raises(ConfigError, match=r"'7' in tree.* has no key; write key=value, keys: \['arity', 'pieces'\]"):
        algorithm("tree:4,7")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("tree:arity=two", "int"),
        ("tree:arity=2.5", "int"),
        ("every:1,share=half", "float"),
        ("every:1,wanted=2", "bool"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(text: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"is not a {kind}"):
        parse("thing", text, TABLE)


def test_a_setting_given_twice_is_refused() -> None:
    for text in ("tree:arity=3,arity=4", "tree:3,arity=4"):
        with pytest.raises(ConfigError, match="arity"):
            algorithm(text)


@pytest.mark.parametrize("text", ["every:3,label=(a", "every:3,label=a),two_words=(4"])
def test_brackets_that_do_not_match_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="brackets"):
        parse("thing", text, TABLE)


def test_a_setting_that_has_no_default_must_be_given() -> None:
    with pytest.raises(ConfigError, match="count"):
        parse("thing", "every", TABLE)


def test_settings_are_frozen_and_keyword_only() -> None:
    for cls in ALGORITHMS.values():
        assert cls.__dataclass_params__.frozen
        assert all(field.kw_only for field in fields(cls))
