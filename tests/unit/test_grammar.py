"""Answers that keep to a structure, with a random model that would say anything."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from random_schemas import random_schema
from text_model import END, save_sentencepiece_model, save_text_model, tokenizer
from tokenizers import AddedToken, Tokenizer

from baton.core.errors import InvalidGrammar
from baton.core.types import AttemptKey, ChatPrompt, Request, Sampling, Structure, Tool, Work
from baton.core.wire import work_from, work_to
from baton.engine.engine import Engine
from baton.engine.gpu.sampler import GpuSampler
from baton.engine.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.router.answers.answer import splitter_for
from baton.router.answers.answer_events import AnswerDelta
from baton.router.answers.answer_format import AnswerFormat
from baton.router.answers.tool_formats import FORMATS, HARMONY, HERMES, ToolFormat
from baton.router.prompts import grammar_checks
from baton.router.prompts.output_grammar import ANY_OBJECT, after_reasoning, either, grammar_of
from baton.router.prompts.text import Text

PROMPT = [3, 50, 7]
MOST = 600
TOKENIZER = tokenizer()
STOPS = frozenset({TOKENIZER.token_to_id(END)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("text-model")
    save_text_model(made)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, kv_memory=64 << 20)


def work(structure: Structure, sampling: Sampling, answered: tuple[int, ...] = ()) -> Work:
    return Work(
        AttemptKey("r", 1),
        [*PROMPT, *answered],
        sampling,
        MOST,
        STOPS,
        answer_tokens=len(answered),
        grammar=grammar_of(structure),
    )


def begin(engine: Engine, asked: Work) -> Sequence:
    made = Sequence(asked, engine.pool.acquire(engine.pool.pages_for(len(PROMPT) + MOST)))
    made.set_guide(engine.guide(asked))
    return made


def write(engine: Engine, sequences: list[Sequence]) -> list[str]:
    """The answers, all written together."""
    running = list(sequences)
    while running:
        plan = {each: each.uncomputed for each in running}
        for each, token in zip(list(running), engine.step(plan), strict=True):
            assert isinstance(token, int), token
            if each.append(token) is not None:
                running.remove(each)
    for each in sequences:
        each.lease.release()
    return [text(each) for each in sequences]


def text(sequence: Sequence) -> str:
    assert sequence.tokens[-1] in STOPS
    decoded: str = TOKENIZER.decode(sequence.tokens[len(PROMPT) :])
    return decoded


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=1.5, top_p=0.9, top_k=50, seed=2),
    Sampling(temperature=1.0, frequency_penalty=1.0, repetition_penalty=1.2, seed=3),
    Sampling(temperature=0.7, min_p=0.01, logit_bias=((5, 20.0), (40, 5.0)), seed=4),
]


@pytest.mark.parametrize("part", range(2))
def test_every_answer_is_as_its_random_schema_says(engine: Engine, part: int) -> None:
    draw = random.Random(part)
    schemas = [random_schema(draw) for _ in range(50)]
    asked = [
        work(Structure("json_schema", json.dumps(schema)), SAMPLINGS[index % len(SAMPLINGS)])
        for index, schema in enumerate(schemas)
    ]
    for schema, answer in zip(
        schemas, write(engine, [begin(engine, each) for each in asked]), strict=True
    ):
        jsonschema.validate(
            json.loads(answer),
            schema,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )


def test_regular_expressions_and_lark_are_kept_to_as_well(engine: Engine) -> None:
    warm = Sampling(temperature=1.0, seed=5)
    regex = r"(ab|[x-z]{3}) \d{2,4}\."
    lark = 'start: greeting " " NAME\ngreeting: "hello" | "bye"\nNAME: /[A-Z][a-z]{1,6}/'
    asked = [work(Structure("regex", regex), warm), work(Structure("lark", lark), warm)]
    matched, sentence = write(engine, [begin(engine, each) for each in asked])
    assert re.fullmatch(regex, matched)
    assert re.fullmatch("(hello|bye) [A-Z][a-z]{1,6}", sentence)


def test_an_answer_goes_on_elsewhere_as_if_it_had_never_stopped(engine: Engine) -> None:
    schema = json.dumps(random_schema(random.Random(99)))
    structure, warm = Structure("json_schema", schema), Sampling(temperature=1.0, seed=6)
    whole = begin(engine, work(structure, warm))
    write(engine, [whole])
    tokens = tuple(whole.tokens[len(PROMPT) :])
    for cut in (1, len(tokens) // 2, len(tokens) - 1):
        rest = begin(engine, work(structure, warm, tokens[:cut]))
        write(engine, [rest])
        assert rest.tokens == whole.tokens


def test_rows_without_a_grammar_are_not_held_to_anybodys(engine: Engine) -> None:
    plain = Work(AttemptKey("p", 1), PROMPT, Sampling(), 8, frozenset())
    alone = Sequence(plain, engine.pool.acquire(engine.pool.pages_for(20)))
    beside = Sequence(plain, engine.pool.acquire(engine.pool.pages_for(20)))
    guided = begin(engine, work(ANY_OBJECT, Sampling()))
    for _ in range(8):
        alone.append(engine.step({alone: alone.uncomputed})[0])  # type: ignore[arg-type]
        plan = {guided: guided.uncomputed, beside: beside.uncomputed}
        for each, token in zip((guided, beside), engine.step(plan), strict=True):
            each.append(token)  # type: ignore[arg-type]
    assert beside.tokens == alone.tokens
    for each in (alone, beside, guided):
        each.lease.release()


def test_a_gpu_keeps_to_a_grammar_as_a_cpu_does(engine: Engine, device: torch.device) -> None:
    size = engine.architecture.vocabulary_size
    sequences = [begin(engine, work(Structure("regex", "[ab]{3}"), each)) for each in SAMPLINGS]
    plain = Work(AttemptKey("p", 1), PROMPT, Sampling(), 8, frozenset())
    sequences.append(Sequence(plain, engine.pool.acquire(1)))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        logits = torch.randn(len(sequences), size + 3, generator=generator) * 3
        tokens = GpuSampler(size).sample(logits.to(device), sequences).tolist()
        assert tokens == Sampler(size).sample(logits, sequences)
        for each, token in zip(sequences, tokens, strict=True):
            each.append(token)
    for each in sequences[:-1]:
        assert re.fullmatch("[ab]{3}", TOKENIZER.decode(each.tokens[len(PROMPT) :]))
        each.expected = 1
        assert each.planned_out  # the next mask needs the token that is still under way
    for each in sequences:
        each.lease.release()


@pytest.mark.parametrize(
    ("structure", "fault"),
    [
        (Structure("json_schema", '{"type": "strin"}'), "strin"),
        (Structure("json_schema", '{"type": "string", "minLength": 3, "maxLength": 1}'), "minLen"),
        (Structure("json_schema", '{"not": {}}'), "not"),
        (Structure("json_schema", "{"), "Expecting property name"),
        (Structure("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000), "recursion depth"),
        (Structure("json_schema", '{"const": -9223372036854775808}'), "-9223372036854775808"),
        (Structure("json_schema", '{"enum": [1, [9007199254740992]]}'), "9007199254740992"),
        (Structure("json_schema", '{"maximum": -1e19}'), "maximum -1e+19"),
        (Structure("json_schema", "[]"), "object"),
        (Structure("json_schema", '{"$ref": "http://elsewhere/"}'), "elsewhere"),
        (Structure("regex", "(a"), "unclosed group"),
        (Structure("regex", "(?=a)b"), "look-around"),
        (Structure("lark", "start: nothing"), "nothing"),
        (Structure("json_schema", '{"const": "' + "x" * 2**17 + '"}'), "more than"),
    ],
)
def test_a_structure_that_cannot_be_is_refused_with_its_fault(
    structure: Structure, fault: str
) -> None:
    with pytest.raises(InvalidGrammar, match=re.escape(fault)) as refused:
        grammar_of(structure)
    assert refused.value.field in ("json_schema", "regex", "grammar")


DEEP = "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(5000)) + 'r5000: "a"'


@pytest.mark.parametrize("source", [DEEP, 'start: %json {"const": -9223372036854775808}'])
def test_a_structure_that_ends_the_process_which_checks_it_is_refused(source: str) -> None:
    with pytest.raises(InvalidGrammar, match="nested too deeply"):
        grammar_of(Structure("lark", source))
    assert grammar_of(Structure("regex", f"after {len(source)}"))


def test_a_structure_that_takes_long_to_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = grammar_checks.GrammarChecks()
    assert checks.check("regex", "a") == (grammar_of(Structure("regex", "a")), "")
    assert checks._process is not None
    os.kill(checks._process.pid, signal.SIGSTOP)
    # More than a pipe holds.
    long = "b" * 100_000
    with monkeypatch.context() as patched:
        patched.setattr(grammar_checks, "CHECK_SECONDS", 0.1)
        assert checks.check("regex", long) == ("", "checking it takes more than 0.1 seconds")
    assert checks.check("regex", long) == (grammar_of(Structure("regex", long)), "")


def test_structures_are_checked_beside_thousands_of_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.dup(0) for _ in range(1100)]
    try:
        assert grammar_checks.GrammarChecks().check("regex", "a")[1] == ""
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("name", ["const", "enum", "minimum"])
def test_a_property_may_be_named_as_a_keyword(name: str) -> None:
    inner = {"type": "integer", "maximum": 2**64}
    grammar_of(Structure("json_schema", json.dumps({"properties": {name: inner}})))


def test_a_fork_checks_structures_in_a_process_of_its_own() -> None:
    grammar_of(Structure("regex", "before"))
    fork = multiprocessing.get_context("fork").Pool(1)
    with fork:
        found = fork.apply(grammar_of, (Structure("regex", "in the fork"),))
    assert found == grammar_of(Structure("regex", "in the fork"))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 2**64 - 1},
        {"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38},
        {"items": {"type": "integer", "maximum": 1e300}, "type": "array", "maxItems": 3},
    ],
)
def test_answers_keep_to_bounds_beyond_exact_integers(
    engine: Engine, schema: dict[str, object]
) -> None:
    structure = Structure("json_schema", json.dumps(schema))
    asked = [work(structure, Sampling(temperature=1.0, seed=seed)) for seed in range(3)]
    for answer in write(engine, [begin(engine, each) for each in asked]):
        jsonschema.validate(json.loads(answer), schema)


def test_a_grammar_that_only_the_tokenizer_refuses_fails_its_request_alone(
    engine: Engine,
) -> None:
    asked = work(Structure("lark", "start: <|no-such-token|>"), Sampling())
    with pytest.raises(InvalidGrammar, match="no-such-token"):
        engine.step({begin(engine, asked): len(PROMPT)})


@pytest.mark.parametrize(
    ("structure", "fault"),
    [
        (Structure("json_schema", '{"$ref": "#"}'), "the structure allows no token here"),
        (Structure("lark", 'start: start "a"'), "the structure allows no token here"),
        (
            Structure("lark", 'start: many{0,3000} "a"{400}\nmany: "a" | many many | ""'),
            "too complex: ",
        ),
    ],
)
def test_a_structure_that_leads_nowhere_is_the_callers_fault_in_one_line(
    engine: Engine, structure: Structure, fault: str
) -> None:
    with pytest.raises(InvalidGrammar, match=fault) as refused:
        write(engine, [begin(engine, work(structure, Sampling()))])
    assert "\n" not in str(refused.value)


def test_the_grammar_travels() -> None:
    asked = work(ANY_OBJECT, Sampling())
    assert work_from(work_to(asked)) == asked


def test_a_tokenizer_of_sentencepieces_alone_will_do(tmp_path: Path) -> None:
    pieces = save_sentencepiece_model(tmp_path)
    model = Engine.load(tmp_path, kv_memory=64 << 20)
    expression = "The (lazy|quick) (fox|dog) [0-9]{3}é"
    warm = Sampling(temperature=1.0, seed=1)
    asked = replace(
        work(Structure("regex", expression), warm), stop_token_ids=frozenset({pieces.eos_id()})
    )
    made = begin(model, asked)
    while not (made.generated and made.tokens[-1] == pieces.eos_id()):
        (token,) = model.step({made: made.uncomputed})
        assert isinstance(token, int)
        made.append(token)
    assert re.fullmatch(expression, pieces.decode(made.tokens[len(PROMPT) : -1]))


ADD = Tool("add", parameters='{"type": "object", "properties": {"a": {"enum": [1, 2]}}}')
SAY = Tool(
    "say",
    parameters='{"type": "object", "properties": {"word": {"type": "string", "maxLength": 4}},'
    ' "required": ["word"], "additionalProperties": false}',
)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", ["", "say"])
def test_a_forced_call_is_one_that_its_parser_reads(
    engine: Engine, form: ToolFormat, name: str
) -> None:
    bounded = Tool(ADD.name, parameters=ADD.parameters[:-1] + ', "additionalProperties": false}')
    chat = ChatPrompt((), (bounded, SAY), must_call=True, allowed_tools=(name,) if name else ())
    structure = AnswerFormat(form, reasoning=False).forced_call(chat, lambda mark: None)
    warm = [Sampling(temperature=1.0, seed=seed) for seed in range(2)]
    for answer in write(engine, [begin(engine, work(structure, each)) for each in warm]):
        parser = splitter_for(AnswerFormat(form, reasoning=False), chat, thinking=False, new_id=str)
        parts = AnswerDelta("", [])
        parser.push(answer, parts)
        parser.flush(parts)
        assert parts.text == ""
        (named,) = parts.tool_calls
        assert named.name in ({name} if name else {"add", "say"})
        arguments = json.loads(named.arguments)
        tool = SAY if named.name == "say" else bounded
        jsonschema.validate(arguments, json.loads(tool.parameters))


@pytest.mark.parametrize("form", ["hermes", "kimi"])
def test_parameters_that_no_call_can_follow_are_the_fault_of_the_tools(form: str) -> None:
    bad = Tool("bad", parameters='{"type": "object", "properties": {"a": {"not": {}}}}')
    chat = ChatPrompt((), (SAY, bad), must_call=True)
    structure = AnswerFormat(FORMATS[form], reasoning=False).forced_call(chat, lambda mark: None)
    with pytest.raises(InvalidGrammar) as refused:
        grammar_of(structure)
    assert refused.value.field == "tools"
    assert refused.value.message == 'tools cannot be used: Unimplemented keys: ["not"]'


@pytest.mark.parametrize(
    ("form", "kind"),
    [*((form, "json_schema") for form in FORMATS.values()), (HERMES, "regex"), (HERMES, "lark")],
    ids=[*FORMATS, "regex", "lark"],
)
def test_an_answer_calls_a_tool_or_keeps_to_its_structure(
    engine: Engine, form: ToolFormat, kind: Literal["json_schema", "regex", "lark"]
) -> None:
    source = {
        "json_schema": '{"type": "object", "properties": {"a": {"enum": [1, 2]}},'
        ' "required": ["a"], "additionalProperties": false}',
        "regex": '\\{"a": ?[12]\\}',
        "lark": 'start: "{" "\\"a\\": " ("1" | "2") "}"',
    }
    chat = ChatPrompt((), (SAY,))
    call = grammar_of(AnswerFormat(form, reasoning=False).forced_call(chat, lambda mark: None))
    asked = work(Structure(kind, source[kind]), Sampling())
    openers = (form.opener[0], "{")
    liked = [((TOKENIZER.token_to_id(first), 50.0),) for first in openers]
    samplings = [Sampling(temperature=1.0, seed=1, logit_bias=bias) for bias in liked]
    tried = replace(asked, grammar=either(call, asked.grammar))
    begun = [begin(engine, replace(tried, sampling=sampling)) for sampling in samplings]
    for first, answer in zip(openers, write(engine, begun), strict=True):
        parser = splitter_for(AnswerFormat(form, reasoning=False), chat, thinking=False, new_id=str)
        parts = AnswerDelta("", [])
        parser.push(answer, parts)
        parser.flush(parts)
        assert bool(parts.tool_calls) != bool(parts.text)
        assert parts.tool_calls or json.loads(parts.text)["a"] in (1, 2)
        assert form.bare or bool(parts.tool_calls) == (first != "{")


ANALYSIS = "<|channel|>analysis<|message|>So {.\n<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.say <|constrain|>json<|message|>{"word": "a"}'
FINAL = '<|channel|>final<|message|>{"a": 1}'


@pytest.mark.parametrize(
    ("tools", "must_call", "allowed", "refused"),
    [
        ((SAY,), True, [CALL, ANALYSIS + CALL], [FINAL, "{}"]),
        ((SAY,), False, [CALL, FINAL, ANALYSIS + CALL, ANALYSIS + FINAL], ['{"a": 1}']),
        ((), False, [FINAL, ANALYSIS + FINAL], [CALL, ANALYSIS + CALL, '{"a": 1}']),
    ],
)
def test_a_structure_is_within_the_messages_of_harmony(
    tools: tuple[Tool, ...], must_call: bool, allowed: list[str], refused: list[str]
) -> None:
    marks = Tokenizer.from_str(TOKENIZER.to_str())
    form = AnswerFormat(HARMONY, reasoning=True)
    marks.add_special_tokens([*form.markers])

    def special(mark: str) -> int | None:
        return marks.token_to_id(mark) if mark in form.markers else None

    wanted = None if must_call else Structure("json_schema", '{"type": "object"}')
    chat = ChatPrompt((), tools, must_call=must_call)
    request = Request("id", chat, Sampling(), 8, structure=wanted)
    grammars = [grammar_of(each) for each in form.structures(request, special)]
    grammar = form.composed(grammars, request, special, thinking=False)
    for text in (*allowed, *refused):
        matcher = LLMatcher(LLTokenizer(marks.to_str()), grammar)
        kept = matcher.consume_tokens(marks.encode(text).ids) and matcher.is_accepting()
        assert kept == (text in allowed), (text, matcher.get_error())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("end", ["</think>", "[/THINK]", "<channel|>"])
def test_reasoning_may_end_with_another_mark(end: str, special: bool) -> None:
    marks = Tokenizer.from_str(TOKENIZER.to_str())
    if special:
        marks.add_special_tokens([end])
    token = marks.token_to_id(end) if special else None
    grammar = after_reasoning(grammar_of(Structure("regex", "[ab]{2}")), end, token)
    for text, allowed in ((f"Hm {{.{end}\nab", True), (f"Hm.{end}c", False), ("Hm. ab", False)):
        matcher = LLMatcher(LLTokenizer(marks.to_str()), grammar)
        kept = matcher.consume_tokens(marks.encode(text).ids) and matcher.is_accepting()
        assert kept == allowed, (text, matcher.get_error())


@pytest.mark.parametrize("special", [False, True])
def test_markers_that_are_added_tokens_are_written_as_these(special: bool, tmp_path: Path) -> None:
    """In Qwen's tokenizers they are not special, but no text to llguidance either."""
    marks = save_text_model(tmp_path)
    added = ("<tool_call>", "</tool_call>", "</think>")
    marks.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    marks.save(str(tmp_path / "tokenizer.json"))
    special_id, chat = Text.load(tmp_path).special_id, ChatPrompt((), (SAY,), must_call=True)
    call = grammar_of(AnswerFormat(HERMES, reasoning=True).forced_call(chat, special_id))
    grammar = after_reasoning(call, "</think>", special_id("</think>"))
    matcher = LLMatcher(LLTokenizer(marks.to_str()), grammar)
    said = '{"name": "say", "arguments": {"word": "hi"}}'
    tokens = marks.encode(f"Hm.</think>\n\n<tool_call>\n{said}\n</tool_call>").ids
    assert {marks.token_to_id(text) for text in added} <= set(tokens)
    for token in tokens:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert mask[token], marks.id_to_token(token)
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()


def test_a_structure_may_come_after_reasoning(engine: Engine) -> None:
    regex = work(Structure("regex", "[ab]{2}"), Sampling(temperature=1.0, seed=3))
    lark = work(Structure("lark", 'start: "c"'), Sampling(temperature=1.0, seed=4))
    ends = TOKENIZER.encode("</think>").ids
    for asked, answer in ((regex, "[ab]{2}"), (lark, "c")):
        thoughtful = replace(
            asked,
            grammar=after_reasoning(asked.grammar),
            prompt_tokens=[*PROMPT, *TOKENIZER.encode("Hm, {").ids, *ends],
            answer_tokens=len(TOKENIZER.encode("Hm, {").ids) + len(ends),
        )
        (written,) = write(engine, [begin(engine, thoughtful)])
        assert re.fullmatch(f"Hm, {{</think>\\n{{0,2}}{answer}", written)
