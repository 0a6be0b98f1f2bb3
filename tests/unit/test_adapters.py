"""LoRA adapters on an engine: PEFT is the oracle."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapters import (
    ALL,
    ATTENTION,
    LATENT,
    change_adapter_config,
    change_tensors,
    load_now,
    open_pool,
    save_adapter,
)
from engine_loop import load, serve
from rank_threads import split_engine
from tiny_models import TINY_MODELS, choices_of_transformers, save
from transformers import PreTrainedModel

from baton.core.adapter_config import read_adapter_config
from baton.core.adapter_store import find_adapter
from baton.core.errors import (
    AdapterMissing,
    BatonError,
    InvalidAdapter,
    InvalidConfig,
    Unavailable,
)
from baton.core.types import Adapter, AttemptKey, Sampling, Work
from baton.engine.adapter_pool import AdapterPool
from baton.engine.engine import Engine
from baton.engine.runner import Runner
from baton.engine.sequence import Sequence
from baton.kernels.cpu import compiler
from baton.kernels.low_rank import AdapterProducts

PROMPTS = [[(7 * place * place + 3 * number) % 199 for place in range(20 + 5 * number)]
           for number in range(6)]  # fmt: skip
COUNT = 12

SETTINGS: list[dict[str, object]] = [
    {"r": 1, "target_modules": ["q_proj"]},
    {"r": 6, "target_modules": ATTENTION, "use_rslora": True},
    {"r": 16, "lora_alpha": 3, "target_modules": ALL},
    {"r": 5, "target_modules": ["gate_proj", "down_proj"], "layers_to_transform": [0, 2]},
    {
        "r": 3,
        "target_modules": ["k_proj", "up_proj"],
        "rank_pattern": {"layers.1.self_attn.k_proj": 9, "up_proj": 2},
        "alpha_pattern": {r"layers\.\d.mlp.up_proj": 11},
        "exclude_modules": ["layers.2.mlp.up_proj"],
    },
]  # fmt: skip


def load_products(engine: Engine, folder: Path) -> AdapterProducts:
    assert isinstance(engine._runner, Runner)
    return engine._runner.load_adapter(find_adapter(str(folder)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path, Engine]:
    """A base, the folder of an adapter of it, and an engine that runs the base."""
    folder = tmp_path_factory.mktemp("made")
    base = save(TINY_MODELS["llama"], folder / "base")
    save_adapter(base, folder / "adapter")
    return base, folder / "adapter", load(folder / "base")


@pytest.fixture
def folder(made: tuple[PreTrainedModel, Path, Engine], tmp_path: Path) -> Path:
    """A copy of the adapter's folder."""
    return shutil.copytree(made[1], tmp_path / "adapter")


@pytest.fixture
def base(made: tuple[PreTrainedModel, Path, Engine]) -> PreTrainedModel:
    return made[0]


@pytest.fixture
def engine(made: tuple[PreTrainedModel, Path, Engine]) -> Engine:
    return made[2]


@pytest.mark.parametrize(
    "name", ["llama-biases", "qwen2", "gemma3", "granite", "olmo2", "mixtral", "phi3-partial"]
)
def test_a_batch_of_several_adapters_answers_as_peft(name: str, tmp_path: Path) -> None:
    name = next(each for each in TINY_MODELS if each.startswith(name))
    base = save(TINY_MODELS[name], tmp_path / "base")
    sparse, fused = name.startswith("mixtral"), name.startswith("phi3")
    settings = SETTINGS[1:2] * 2 if sparse else SETTINGS
    if fused:
        settings = [{"r": 6, "target_modules": ["qkv_proj", "o_proj"]},
                    {"r": 3, "target_modules": ["gate_up_proj", "down_proj"]}]  # fmt: skip
    models = [
        save_adapter(base, tmp_path / str(seed), seed=seed, **each)
        for seed, each in enumerate(settings)
    ]
    check_as_peft(load(tmp_path / "base"), base, models, tmp_path)


def check_as_peft(
    engine: Engine, base: PreTrainedModel, models: list[PreTrainedModel], folder: Path
) -> None:
    """One batch of all, and of the base, whose adapters are in folders by their numbers."""
    found = [find_adapter(str(folder / str(seed))) for seed in range(len(models))]
    load_now(open_pool(engine), *found)
    prompts = PROMPTS[: len(models) + 1]
    answers = serve(engine, prompts, COUNT, chunk=7, adapters=[*found, None])
    choices = [
        choices_of_transformers(model, [prompt], [answer])[0]
        for model, prompt, answer in zip([*models, base], prompts, answers, strict=True)
    ]
    assert answers == choices
    plain = serve(engine, prompts, COUNT, chunk=7)
    changed = [one != other for one, other in zip(answers[:-1], plain[:-1], strict=True)]
    assert changed.count(False) <= 1  # one of rank 1 may change nothing
    assert answers[-1] == plain[-1]


@pytest.mark.parametrize("name", [each for each in TINY_MODELS if each.startswith("deepseek")])
def test_adapters_of_latent_attention_answer_as_peft(name: str, tmp_path: Path) -> None:
    base = save(TINY_MODELS[name], tmp_path / "base")
    queries = ["q_a_proj", "q_b_proj"] if base.config.q_lora_rank else ["q_proj"]
    settings: list[dict[str, object]] = [
        {"r": 6, "target_modules": [*queries, *LATENT], "use_rslora": True},
        {"r": 3, "target_modules": ["kv_b_proj"]},
        {"r": 5, "target_modules": [queries[-1], "kv_a_proj_with_mqa"]},
    ]
    models = [
        save_adapter(base, tmp_path / str(seed), seed=seed, **each)
        for seed, each in enumerate(settings)
    ]
    check_as_peft(load(tmp_path / "base"), base, models, tmp_path)


@pytest.mark.parametrize("name", ["llama-biases", "phi3-partial", "olmo2", "deepseek-v2"])
def test_two_ranks_share_adapters_too(name: str, tmp_path: Path) -> None:
    """With one place for two adapters: both ranks drop one for the other."""
    base = save(TINY_MODELS[name], tmp_path / "base")
    special = {
        "phi3-partial": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        "deepseek-v2": ["q_a_proj", "q_b_proj", *LATENT],
    }
    targets = special.get(name, ALL)
    models = [
        save_adapter(base, tmp_path / str(seed), seed=seed, target_modules=targets)
        for seed in range(2)
    ]
    found = [find_adapter(str(tmp_path / str(seed))) for seed in range(2)]
    with split_engine(tmp_path / "base", 2, tmp_path) as split:
        pool = open_pool(split.engine, slots=1)
        for seed in (0, 1, 0):
            load_now(pool, found[seed])
            adapters = [found[seed], None]
            answers = serve(split.engine, PROMPTS[:2], COUNT, chunk=7, adapters=adapters)
            for model, prompt, answer in zip((models[seed], base), PROMPTS, answers, strict=False):
                assert [answer] == choices_of_transformers(model, [prompt], [answer])
        for other in split.others:
            assert isinstance(other._runner, Runner)
            assert set(other._runner.adapters) == {found[0].digest}


@pytest.mark.skipif(not compiler.available(), reason="needs compiled kernels")
@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        ("llama-biases", "float32", "none"),
        ("llama-biases", "bfloat16", "none"),
        ("llama-biases", "float32", "int8"),
        ("deepseek-v3", "float32", "none"),
        ("deepseek-v3", "bfloat16", "none"),
    ],
)
def test_a_row_has_the_same_bits_alone_and_beside_other_adapters(
    name: str, dtype: str, quantization: str, tmp_path: Path
) -> None:
    base = save(TINY_MODELS[name], tmp_path / "base")
    latent: list[dict[str, object]] = [
        {"r": rank, "target_modules": ["q_b_proj", *LATENT]} for rank in (2, 3, 8, 5, 6)
    ]
    settings = latent if name.startswith("deepseek") else SETTINGS
    for seed, each in enumerate(settings):
        save_adapter(base, tmp_path / str(seed), seed=seed, **each)
    found = [find_adapter(str(tmp_path / str(seed))) for seed in range(len(SETTINGS))]
    engine = load(tmp_path / "base", dtype=dtype, quantization=quantization)
    load_now(open_pool(engine), *found)
    adapters = [*found, None]

    def scores(which: list[int], chunk: int) -> list[object]:
        sequences = []
        for place in which:
            work = Work(
                AttemptKey(str(place), 0), PROMPTS[place], Sampling(), 4, frozenset(),
                prompt_logprobs=3, adapter=adapters[place],
            )  # fmt: skip
            pages = engine.pool.pages_for(len(PROMPTS[place]) + 4)
            sequences.append(Sequence(work, engine.pool.acquire(pages)))
        while left := [each for each in sequences if each.generated < 4]:
            plan = {each: min(chunk, each.uncomputed) for each in left}
            for each, token in zip(plan, engine.step(plan), strict=True):
                if isinstance(token, int):
                    each.append(token)
        for each in sequences:
            each.lease.release()
        return [(each.tokens, each.prompt_scores) for each in sequences]

    everyone = list(range(len(adapters)))
    alone = [scores([place], chunk=64)[0] for place in everyone]
    assert scores(everyone, chunk=64) == alone
    assert scores(everyone[::-1], chunk=5) == alone[::-1]


def test_the_digest_is_of_what_an_adapter_holds(
    base: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    one, copied = folder, shutil.copytree(folder, tmp_path / "copy")
    change_adapter_config(copied, base_model_name_or_path="elsewhere", lora_dropout=0.5)
    digest = find_adapter(str(one)).digest
    assert find_adapter(str(copied)).digest == digest
    change_adapter_config(copied, lora_alpha=9)
    assert find_adapter(str(copied)).digest != digest
    save_adapter(base, copied, seed=1)
    assert find_adapter(str(copied)).digest != digest


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"init_lora_weights": "pissa"}, "it changes the base"),
        ({"r": 257}, "a rank must be 1 to 256, not 257"),
        ({"rank_pattern": {"q_proj": 0}}, "a rank must be 1 to 256, not 0"),
        ({"lora_alpha": "8"}, "'lora_alpha' must not be '8'"),
        ({"target_modules": None}, "lacks 'target_modules'"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    changes: dict[str, object], reason: str, folder: Path
) -> None:
    change_adapter_config(folder, **changes)
    with pytest.raises(InvalidAdapter, match=reason):
        read_adapter_config(folder)


def test_a_null_bias_counts_as_absent_like_other_nulls(folder: Path) -> None:
    stated = read_adapter_config(folder)
    change_adapter_config(folder, bias=None, use_dora=None, rank_pattern=None)
    assert read_adapter_config(folder) == stated


BAD: dict[str, Callable[[Path], None]] = {
    "not finite": lambda folder: change_tensors(
        folder, q_proj_lora_A_weight=torch.full((4, 48), float("nan"))
    ),
    "has shape": lambda folder: change_tensors(folder, q_proj_lora_B_weight=torch.zeros(7, 4)),
    "lacks its counterpart": lambda folder: change_tensors(folder, q_proj_lora_B_weight=None),
    "lacks the tensors of model.layers": lambda folder: change_tensors(
        folder, layers_1_self_attn_q_proj_lora_A_weight=None,
        layers_1_self_attn_q_proj_lora_B_weight=None,
    ),
    "is torch.int64, not a float": lambda folder: change_tensors(
        folder, q_proj_lora_A_weight=torch.zeros(4, 48, dtype=torch.int64)
    ),
    "cannot read": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "is not a pattern": lambda folder: change_adapter_config(folder, rank_pattern={"(": 4}),
}  # fmt: skip


@pytest.mark.parametrize("reason", BAD)
def test_bad_weights_are_refused(reason: str, engine: Engine, folder: Path) -> None:
    BAD[reason](folder)
    with pytest.raises(InvalidAdapter, match=reason):
        load_products(engine, folder)


@pytest.mark.parametrize(
    ("model", "targets", "reason"),
    [
        ("llama", ["lm_head"], "lm_head.* is not supported: adapters add to linear layers"),
        ("llama", ["embed_tokens"], "embed_tokens.* is not supported"),
        ("mixtral", ["gate"], "target_parameters is not supported"),
        ("qwen2-moe", ["shared_expert.up_proj"], "the model has no place for tensor"),
    ],
)
def test_what_no_adapter_may_add_to_is_refused(
    model: str, targets: list[str], reason: str, tmp_path: Path
) -> None:
    name = next(each for each in TINY_MODELS if each.startswith(model))
    base = save(TINY_MODELS[name], tmp_path / "base")
    save_adapter(base, tmp_path / "adapter", target_modules=targets)
    engine = load(tmp_path / "base")
    with pytest.raises(BatonError, match=reason):
        load_products(engine, tmp_path / "adapter")


def test_a_folder_that_has_changed_is_not_loaded(
    base: PreTrainedModel, engine: Engine, folder: Path
) -> None:
    pool, before = open_pool(engine), find_adapter(str(folder))
    save_adapter(base, folder, seed=1)
    with pytest.raises(InvalidAdapter, match="has changed since the adapter was added"):
        load_now(pool, before)
    load_now(pool, find_adapter(str(folder)))


def test_an_adapter_of_another_shape_is_refused(engine: Engine, tmp_path: Path) -> None:
    save_adapter(save(TINY_MODELS["llama-head-dim"], tmp_path / "other"), tmp_path / "adapter")
    with pytest.raises(InvalidAdapter, match="has shape"):
        load_products(engine, tmp_path / "adapter")


def test_models_without_adapters_say_so(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path / "base")
    with pytest.raises(InvalidConfig, match="through transformers"):
        open_pool(load(tmp_path / "base", engine="transformers"))


class TestPool:
    """Without weights: what is loaded, dropped and left out of a step."""

    @pytest.fixture(autouse=True)
    def _pool(self, tmp_path: Path) -> None:
        self.loads: list[bytes] = []
        self.fetched: list[Adapter] = []
        self.missing: BatonError | None = None
        self.held: set[bytes] = set()
        self.pool = AdapterPool(self, 2, [str(tmp_path)], lambda: None)
        self.adapters = [Adapter(bytes([each]), str(tmp_path / "a")) for each in range(4)]

    def load_adapter(self, adapter: Adapter) -> None:
        self.loads.append(adapter.digest)
        if self.missing:
            raise self.missing
        if adapter.digest == b"\x03":
            raise InvalidAdapter("bad")

    def add_adapter(self, adapter: Adapter, weights: None) -> None:
        self.held.add(adapter.digest)

    def drop_adapter(self, digest: bytes) -> None:
        self.held.remove(digest)

    def _sequence(self, adapter: int | None) -> Sequence:
        work = Work(
            AttemptKey("", 0), [1], Sampling(), 1, frozenset(),
            adapter=None if adapter is None else self.adapters[adapter],
        )  # fmt: skip
        return Sequence(work, None)  # type: ignore[arg-type]

    def _settle(self) -> dict[bytes, BatonError]:
        self.pool._thread.submit(lambda: None).result()
        return self.pool.settle()

    def test_the_oldest_sequences_get_the_places(self) -> None:
        sequences = [self._sequence(each) for each in (0, 1, None, 2, 0)]
        plan = dict.fromkeys(sequences, 1)
        assert list(self.pool.runnable(plan)) == [sequences[2]]
        self._settle()
        chosen = list(self.pool.runnable(plan))
        assert chosen == [*sequences[:3], sequences[4]]
        del plan[sequences[0]]
        assert list(self.pool.runnable(plan)) == [sequences[1], sequences[2]]
        self._settle()
        assert list(self.pool.runnable(plan)) == sequences[1:4]
        assert self.loads == [b"\x00", b"\x01", b"\x02"]

    def test_the_one_idle_longest_goes(self) -> None:
        for each in (0, 1):
            self.pool.want(self.adapters[each], ())
        self._settle()
        self.pool.runnable({self._sequence(0): 1})
        self.pool.want(self.adapters[2], ())
        self._settle()
        assert set(self.pool.loaded) == self.held == {b"\x00", b"\x02"}
        for each in (0, 1):
            self.pool.request(self.adapters[each], ())
        assert self.pool.events == {"requested": 2, "hit": 1, "loaded": 3, "evicted": 2}

    @pytest.mark.parametrize("missing", [AdapterMissing("no folder"), Unavailable("no hub")])
    def test_files_that_are_not_here_are_fetched_once(
        self, missing: BatonError, tmp_path: Path
    ) -> None:
        self.missing = missing
        self.pool = AdapterPool(self, 2, [str(tmp_path)], lambda: None, self._fetch)
        named = self.adapters[0]._replace(sources=("peer",))
        self.pool.want(named, ())
        assert self._settle() == {}
        assert (self.fetched, self.held) == ([named], {b"\x00"})
        self.missing = missing
        self.pool.want(self.adapters[1], ())  # without sources
        assert self._settle() == {b"\x01": missing}

    def _fetch(self, adapter: Adapter) -> None:
        self.fetched.append(adapter)
        self.missing = None

    def test_adapters_in_use_stay(self) -> None:
        for each in (0, 1):
            self.pool.want(self.adapters[each], ())
        self._settle()
        assert not self.pool.want(self.adapters[2], {b"\x00", b"\x01"})
        assert not self.pool.loading

    def test_a_failed_load_is_reported_once_and_may_be_tried_again(self) -> None:
        self.pool.want(self.adapters[3], ())
        assert set(self._settle()) == {b"\x03"}
        assert not self._settle()
        self.pool.want(self.adapters[3], ())
        assert set(self._settle()) == {b"\x03"}

    def test_folders_outside_the_allowed_ones_are_refused(self, tmp_path: Path) -> None:
        self.pool.check(self.adapters[0])
        for folder in ("/etc", str(tmp_path / ".." / "other"), f"{tmp_path}x"):
            with pytest.raises(InvalidAdapter, match="not below a folder"):
                self.pool.check(Adapter(b"", folder))
