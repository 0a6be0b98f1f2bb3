"""Grammars that ask for the text of an added token, such as <tool_call> in Qwen's tokenizers, which
is not special there but to llguidance."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from text_model import END, save_text_model
from tokenizers import AddedToken, Tokenizer

from baton.core.types import AttemptKey, Sampling, Structure, Work
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.router.prompts.output_grammar import after_reasoning, grammar_of

TAGS = ("<tool_call>", "</tool_call>", "</think>")
MOST = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tagged")
    tagged = save_text_model(made)
    tagged.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    tagged.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, kv_memory=64 << 20)


def answer(engine: Engine, tokenizer: Tokenizer, grammar: str, seed: int = 0) -> list[int]:
    ends = frozenset({tokenizer.token_to_id(END)})
    warm = Sampling(temperature=1.0, seed=seed)
    asked = Work(AttemptKey("r", 1), [3, 50, 7], warm, MOST, ends, grammar=grammar)
    with engine.pool.acquire(engine.pool.pages_for(3 + MOST)) as lease:
        sequence = Sequence(asked, lease)
        sequence.set_guide(engine.guide(asked))
        ended = None
        while ended is None:
            (token,) = engine.step({sequence: sequence.uncomputed})
            assert isinstance(token, int), token
            ended = sequence.append(token)
        return sequence.tokens[3:-1]


SPECIAL = [
    Structure("json_schema", json.dumps({"const": f"a{END}b"})),
    Structure("json_schema", json.dumps({"enum": [END, f"{END}{END}"]})),
    Structure("regex", f"a{re.escape(END)}|{re.escape(END)}b"),
]


@pytest.mark.parametrize("structure", SPECIAL, ids=lambda each: each.source[:20])
def test_the_text_of_a_special_token_is_written_with_others(
    structure: Structure, engine: Engine, tokenizer: Tokenizer
) -> None:
    for seed in range(3):
        tokens = answer(engine, tokenizer, grammar_of(structure), seed)
        assert tokenizer.token_to_id(END) not in tokens
        text = tokenizer.decode(tokens)
        if structure.kind == "regex":
            assert re.fullmatch(structure.source, text)
        else:
            jsonschema.validate(json.loads(text), json.loads(structure.source))


FORCED = [
    Structure("lark", 'start: "<tool_call>" body "</tool_call>"\nbody: "{" /[a-c]*/ "}"'),
    Structure("regex", r'<tool_call>\{"name": "[ab]"\}</tool_call>'),
    Structure("json_schema", '{"const": "<tool_call>"}'),
]
FREE = [
    Structure("regex", "(<tool_call>|</think>)[ab]{2}"),
    Structure("json_schema", '{"enum": ["<tool_call>", "</tool_call>"]}'),
]


@pytest.mark.parametrize("structure", [*FORCED, *FREE], ids=lambda each: each.source[:20])
def test_a_grammar_may_ask_for_the_text_of_an_added_token(
    structure: Structure, engine: Engine, tokenizer: Tokenizer
) -> None:
    for seed in range(3):
        tokens = answer(engine, tokenizer, grammar_of(structure), seed)
        text = tokenizer.decode(tokens)
        # Where nothing else may come, it is the token, as the model has learnt it.
        assert structure in FREE or tokenizer.token_to_id("<tool_call>") in tokens
        match structure.kind:
            case "regex":
                assert re.fullmatch(structure.source, text)
            case "json_schema":
                assert text.strip('"') in structure.source
            case "lark":
                assert re.fullmatch(r"<tool_call>\{[a-c]*\}</tool_call>", text)


def test_a_grammar_may_name_an_added_token(engine: Engine, tokenizer: Tokenizer) -> None:
    """Lark has <tool_call> without quotes for the token itself."""
    structure = Structure("lark", "start: <tool_call> /[a-c]/ </tool_call>")
    first, *_, last = answer(engine, tokenizer, grammar_of(structure))
    names = [tokenizer.token_to_id(text) for text in ("<tool_call>", "</tool_call>")]
    assert [first, last] == names


def test_reasoning_still_ends_with_its_token(engine: Engine, tokenizer: Tokenizer) -> None:
    grammar = grammar_of(Structure("regex", "<tool_call>ab"))
    end = tokenizer.token_to_id("</think>")
    guide = engine.guide(
        Work(
            AttemptKey("r", 1),
            [3],
            Sampling(),
            MOST,
            frozenset({tokenizer.token_to_id(END)}),
            grammar=after_reasoning(grammar, "</think>", end),
        )
    )
    assert guide is not None
    tokens = tokenizer.encode("<tool_call>Hm.</think>\n<tool_call>ab").ids
    guide.follow([])
    for token in tokens:
        assert guide.mask()[token], tokenizer.id_to_token(token)
        guide.follow([token])
    assert guide.mask().nonzero()[0].tolist() == [tokenizer.token_to_id(END)]


def test_end_tokens_are_never_text(folder: Path, tmp_path: Path) -> None:
    """Not even those that are added tokens in angle brackets, and not special."""
    ended = save_text_model(tmp_path)
    ended.add_tokens([AddedToken("<stop>", special=False, normalized=False)])
    ended.save(str(tmp_path / "tokenizer.json"))
    stop = ended.token_to_id("<stop>")
    ids = {"eos_token_id": [ended.token_to_id(END), stop]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ids))
    engine = Engine.load(tmp_path, kv_memory=1 << 20)
    grammar = grammar_of(Structure("regex", "(.|\n)*x"))
    ends = frozenset(ids["eos_token_id"])
    asked = Work(AttemptKey("r", 1), [3], Sampling(), MOST, ends, grammar=grammar)
    guide = engine.guide(asked)
    assert guide is not None
    guide.follow([])
    assert guide.mask().sum() > 200
    assert not guide.mask()[stop]


def test_an_unset_end_token_is_no_token_of_a_grammar(tmp_path: Path) -> None:
    save_text_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": -1}')
    engine = Engine.load(tmp_path, kv_memory=1 << 20)
    grammar = grammar_of(Structure("regex", "a+"))
    work = Work(AttemptKey("r", 1), [3], Sampling(), MOST, frozenset(), grammar=grammar)
    guide = engine.guide(work)
    assert guide is not None
    guide.follow([])
    assert guide.mask().any()
