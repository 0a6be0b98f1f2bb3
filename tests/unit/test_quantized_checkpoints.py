"""Published quantized checkpoints: their numbers, and their answers against transformers with the
same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_loop import load, serve
from quantized_models import BLOCK, FORMATS, GROUP, one_weight, save_quantized
from rank_threads import split_engine
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, change_config, choices_of_transformers
from torch import Tensor

from baton.core.errors import BatonError, InvalidCheckpoint, InvalidConfig, UnsupportedModel
from baton.engine.checkpoint import Checkpoint, Cut
from baton.engine.engine import fingerprint
from baton.engine.gpu.upload import Upload
from baton.engine.model_choice import read_model
from baton.engine.model_config import ModelConfig
from baton.engine.quantization_config import Quantization, parse_quantization

PROMPTS = [[(7 * at * at + at) % 199 for at in range(length)] for length in (1, 6, 70)]
ANSWER = 6
OUTPUTS, INPUTS = 72, 48
MODULE = "model.layers.0.mlp.up_proj"


def quantization(name: str) -> Quantization:
    stated = ModelConfig({"quantization_config": FORMATS[name].config})
    found = parse_quantization(stated, interleaved=False)
    assert found is not None
    return found


def checkpoint_of(
    folder: Path, name: str, parts: dict[str, Tensor], upload: Upload | None = None
) -> Checkpoint:
    held = {f"{MODULE}.{part}": tensor for part, tensor in parts.items()}
    save_file(held, folder / "model.safetensors")
    return Checkpoint(folder, upload=upload, quantization=quantization(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_what_its_format_says(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    parts, numbers = one_weight(name, OUTPUTS, INPUTS)
    checkpoint = checkpoint_of(tmp_path, name, parts)
    found = torch.empty(OUTPUTS, INPUTS, dtype=dtype)
    checkpoint.copy(f"{MODULE}.weight", found)
    checkpoint.finish()
    assert torch.equal(found, numbers.to(dtype))


@pytest.mark.parametrize(
    "cut", [(0, (24, 24)), (0, (5, 8), (61, 3)), (1, (16, 16)), (1, (3, 10)), (1, (0, 7), (40, 8))]
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_part_of_a_weight_is_dequantized_alone(
    name: str, cut: tuple[int, *tuple[tuple[int, int], ...]], tmp_path: Path
) -> None:
    parts, numbers = one_weight(name, OUTPUTS, INPUTS)
    dimension, *ranges = cut
    wanted = torch.cat([numbers.narrow(dimension, *some) for some in ranges], dim=dimension)
    found = torch.empty_like(wanted)
    asked = Cut(dimension, numbers.shape[dimension], tuple(ranges))
    checkpoint_of(tmp_path, name, parts).copy(f"{MODULE}.weight", found, cut=asked)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["fp8", "fp8-by-block", "int4-by-block"])
def test_a_row_of_blocks_is_not_a_scale_for_each_output(name: str, tmp_path: Path) -> None:
    parts, numbers = one_weight(name, BLOCK[0], BLOCK[0] * BLOCK[1])
    found = torch.empty_like(numbers)
    checkpoint_of(tmp_path, name, parts).copy(f"{MODULE}.weight", found)
    assert torch.equal(found, numbers)


@pytest.mark.parametrize("name", ["fp8", "awq", "int4"])
def test_a_weight_on_its_way_to_a_device_is_dequantized(name: str, tmp_path: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts, numbers = one_weight(name, OUTPUTS, INPUTS)
    checkpoint = checkpoint_of(tmp_path, name, parts, Upload(device))
    found = torch.empty(OUTPUTS, INPUTS, dtype=torch.bfloat16, device=device)
    checkpoint.copy(f"{MODULE}.weight", found)
    checkpoint.finish()
    assert torch.equal(found.cpu(), numbers.bfloat16())


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_answers_as_transformers_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    oracle = save_quantized(name, tmp_path)
    answers = serve(load(tmp_path), PROMPTS, ANSWER, chunk=16)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


FAMILIES = [
    ("mixtral", "awq"),
    ("qwen2-moe", "gptq-asymmetric-act-order"),
    ("qwen3-moe", "int4-asymmetric"),
    ("dots1", "int8"),
    ("deepseek-v2", "fp8-by-channel"),
    ("deepseek-v3", "fp8"),
    ("phi3", "fp8-by-block"),
    ("llama-biases", "gptq-8-bits"),
    ("gemma3", "mixed"),
]


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_any_family_may_be_quantized(family: str, name: str, tmp_path: Path) -> None:
    oracle = save_quantized(name, tmp_path, TINY_MODELS[family])
    answers = serve(load(tmp_path), PROMPTS, ANSWER, chunk=16)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "int4-act-order"), ("phi3", "fp8"), ("mixtral", "awq"), ("deepseek-v3", "fp8")],
)
def test_two_ranks_dequantize_their_parts(family: str, name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    oracle = save_quantized(name, model, TINY_MODELS[family])
    with split_engine(model, 2, tmp_path) as split:
        answers = serve(split.engine, PROMPTS, ANSWER, chunk=16)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


def test_biases_of_zeros_that_quantizers_store_change_nothing(tmp_path: Path) -> None:
    """GPTQ's write them for layers without biases too."""
    oracle = save_quantized("gptq", tmp_path)
    bias = "model.layers.0.mlp.down_proj.bias"
    zeros = torch.zeros(oracle.config.hidden_size, dtype=torch.float16)
    add_tensors(tmp_path, {bias: zeros, "model.layers.2.self_attn.o_proj.bias": zeros.clone()})
    answers = serve(load(tmp_path), PROMPTS, ANSWER, chunk=16)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)
    zeros[3] = 1.0
    add_tensors(tmp_path, {bias: zeros})
    with pytest.raises(InvalidCheckpoint, match=rf"no place for tensor {bias} \(1 such"):
        load(tmp_path)


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Adds tensors to the first file of `save_quantized`, or replaces them."""
    file, index = folder / "model-1.safetensors", folder / "model.safetensors.index.json"
    save_file(load_file(file) | tensors, file)
    stated = json.loads(index.read_text())
    stated["weight_map"] |= dict.fromkeys(tensors, file.name)
    index.write_text(json.dumps(stated))


def test_quantized_attention_beside_quantized_weights_stays_as_it_is_computed(
    tmp_path: Path,
) -> None:
    """As compressed-tensors writes it: a group without weights, and the scales of attention."""
    oracle = save_quantized("fp8-by-channel", tmp_path)
    stated = dict(FORMATS["fp8-by-channel"].config)
    attention = {"targets": ["LlamaAttention"], "format": "dense", "weights": None}
    attention |= {"input_activations": {"num_bits": 8, "type": "float", "dynamic": False}}
    stated["config_groups"] = {**stated["config_groups"], "group_1": attention}  # type: ignore[dict-item]
    change_config(tmp_path, quantization_config=stated)
    parts = [f"{what}_{part}" for what in "qkv" for part in ("scale", "zero_point")]
    names = [f"model.layers.{layer}.self_attn.{part}" for layer in range(3) for part in parts]
    add_tensors(tmp_path, {name: torch.ones(1) for name in names})
    answers = serve(load(tmp_path), PROMPTS, ANSWER, chunk=16)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


def write_in_a_file(folder: Path, name: str, content: dict[str, object]) -> None:
    (folder / name).write_text(json.dumps(content))
    change_config(folder, quantization_config=None)


def test_modelopts_own_file_means_the_same_as_a_quantization_config(tmp_path: Path) -> None:
    oracle = save_quantized("modelopt", tmp_path)
    stated = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    producer = {"name": "modelopt", "version": "0.29.0"}
    content: dict[str, object] = {"producer": producer, "quantization": stated}
    write_in_a_file(tmp_path, "hf_quant_config.json", content)
    scales = {f"model.layers.{layer}.self_attn.k_proj.k_scale": torch.ones(()) for layer in (0, 1)}
    add_tensors(tmp_path, scales)
    answers = serve(load(tmp_path), PROMPTS, ANSWER, chunk=16)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


def test_gptqs_own_file_means_the_same_as_a_quantization_config(tmp_path: Path) -> None:
    oracle = save_quantized("gptq-8-bits", tmp_path)
    stated = {"bits": 8, "group_size": GROUP, "sym": False, "desc_act": True, "damp_percent": 0.1}
    write_in_a_file(tmp_path, "quantize_config.json", stated)
    answers = serve(load(tmp_path), PROMPTS, ANSWER, chunk=16)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


def test_a_compression_config_is_a_quantization_config_of_compressed_tensors(
    tmp_path: Path,
) -> None:
    oracle = save_quantized("int4-asymmetric", tmp_path)
    stated = FORMATS["int4-asymmetric"].config
    change_config(tmp_path, quantization_config=None, compression_config=stated)
    answers = serve(load(tmp_path), PROMPTS, ANSWER, chunk=16)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A8_AWQ", "FP8_PB_WO", "MIXED_PRECISION"])
def test_modelopts_other_formats_are_refused_by_name(algorithm: str, tmp_path: Path) -> None:
    """By transformers' classes too, which do not know the file."""
    save_quantized("modelopt", tmp_path)
    stated: dict[str, object] = {"quantization": {"quant_algo": algorithm}}
    write_in_a_file(tmp_path, "hf_quant_config.json", stated)
    with pytest.raises(UnsupportedModel, match=f"of modelopt in {algorithm} are not supported"):
        read_model(tmp_path)


def test_the_head_may_be_quantized_too(tmp_path: Path) -> None:
    oracle = save_quantized("gptq", tmp_path, TINY_MODELS["llama"].changed(vocab_size=200))
    file = tmp_path / "model-1.safetensors"
    held = load_file(file)
    parts, numbers = one_weight("gptq", *held.pop("lm_head.weight").shape)
    save_file({**held, **{f"lm_head.{part}": each for part, each in parts.items()}}, file)
    index = tmp_path / "model.safetensors.index.json"
    stated = json.loads(index.read_text())
    del stated["weight_map"]["lm_head.weight"]
    stated["weight_map"] |= {f"lm_head.{part}": file.name for part in parts}
    index.write_text(json.dumps(stated))
    with torch.no_grad():
        oracle.lm_head.weight.copy_(numbers)
    answers = serve(load(tmp_path), PROMPTS, ANSWER, chunk=16)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


def test_what_codes_stand_for_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """Zero points of the same files are one more in the older layout."""
    save_quantized("gptq-v2", tmp_path)
    before = fingerprint(tmp_path, read_model(tmp_path))
    older = {**FORMATS["gptq-v2"].config, "checkpoint_format": "gptq"}
    change_config(tmp_path, quantization_config=older)
    assert fingerprint(tmp_path, read_model(tmp_path)) != before


COMPRESSED = [name for name in FORMATS if "config_groups" in FORMATS[name].config]


@pytest.mark.parametrize("name", sorted(set(COMPRESSED) - {"mixed", "int4-act-order"}))
def test_compressed_tensors_decompresses_to_the_same_numbers(name: str) -> None:
    """Its versions since 2026 know no groups of act-order any more."""
    pytest.importorskip("compressed_tensors", reason="the extra `test` has compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(FORMATS[name].config)
    compressor = BaseCompressor.get_value_from_registry(config.format)
    parts, numbers = one_weight(name, 64, INPUTS)
    wide = {part: each.float() if "scale" in part else each for part, each in parts.items()}
    found = compressor.decompress(wide, config.config_groups["group_0"])
    assert torch.equal(found["weight"], numbers)


def test_compressed_tensors_converts_awq_to_the_same_numbers() -> None:
    pytest.importorskip("compressed_tensors", reason="the extra `test` has compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    converter = AutoAWQConverter(group_size=GROUP)
    parts, numbers = one_weight("awq", OUTPUTS, INPUTS)
    converted = converter.process({f"{MODULE}.{part}": each for part, each in parts.items()})
    own = {key.rpartition(".")[2]: each for key, each in converted.items()}
    own["weight_scale"] = own["weight_scale"].float()
    scheme = converter.update_config(None).config_groups["config_group_0"]
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    assert torch.equal(compressor.decompress(own, scheme)["weight"], numbers)


def test_transformers_dequantizes_blocks_of_fp8_to_the_same_numbers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    parts, numbers = one_weight("fp8", 4 * BLOCK[0], 3 * BLOCK[1])
    found = Fp8Dequantize(None).convert(dict(parts), full_layer_name="weight")
    assert torch.equal(found["weight"], numbers)


REFUSED: dict[str, tuple[dict[str, object], type[BatonError], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, UnsupportedModel, "'bitsandbytes'.*awq"),
    "aqlm": ({"quant_method": "aqlm"}, UnsupportedModel, "'aqlm'"),
    "no method": ({}, UnsupportedModel, "'unknown'"),
    "mxfp4 elsewhere": ({"quant_method": "mxfp4"}, UnsupportedModel, "'mxfp4'"),
    "awq for gemv": ({"quant_method": "awq", "version": "gemv"}, UnsupportedModel, "'gemv'"),
    "awq of 8 bits": ({"quant_method": "awq", "bits": 8}, UnsupportedModel, "AWQ with 8 bits"),
    "gptq of 3 bits": ({"quant_method": "gptq", "bits": 3}, UnsupportedModel, "GPTQ with 3 bits"),
    "gptq without bits": ({"quant_method": "gptq"}, InvalidConfig, "lacks 'bits'"),
    "gptq for marlin": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        UnsupportedModel,
        "'marlin'",
    ),
    "gptq by module": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}},
        UnsupportedModel,
        "dynamic",
    ),
    "fp4 experts": ({"quant_method": "fp8", "expert_dtype": "fp4"}, UnsupportedModel, "fp4"),
    "a block of nothing": (
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        InvalidConfig,
        "weight_block_size must be two whole numbers",
    ),
    "nvfp4": (
        {**FORMATS["int4"].config, "format": "nvfp4-pack-quantized"},
        UnsupportedModel,
        "'nvfp4-pack-quantized'",
    ),
    "weights that are not compressed": (
        {**FORMATS["int4"].config, "quantization_status": "frozen"},
        UnsupportedModel,
        "'frozen'",
    ),
    "sparse": (
        {**FORMATS["int4"].config, "sparsity_config": {"format": "sparse-24-bitmask"}},
        UnsupportedModel,
        "sparsity_config",
    ),
    "rotated": (
        {**FORMATS["int4"].config, "transform_config": {"config_groups": {"u": {}}}},
        UnsupportedModel,
        "transform_config",
    ),
    "packed in 3 bits": (
        {
            **FORMATS["int4"].config,
            "config_groups": {"group_0": {"weights": {"num_bits": 3, "type": "int"}}},
        },
        UnsupportedModel,
        "3 bits",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_dequantized_is_refused_by_name(case: str) -> None:
    stated, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        parse_quantization(ModelConfig({"quantization_config": stated}), interleaved=False)


def test_modules_that_gptq_leaves_out_are_no_settings() -> None:
    stated = {**FORMATS["gptq"].config, "dynamic": {"-:.*o_proj.*": {}}, "group_size": -1}
    found = parse_quantization(ModelConfig({"quantization_config": stated}), interleaved=False)
    assert found == Quantization("gptq", 4, "middle", None)


DAMAGED: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "no scales": ("gptq", {"scales": None}, f"{MODULE}.scales is missing"),
    "codes alone": ("fp8", {"weight_scale_inv": None}, "float8_e4m3fn, not a float"),
    "no codes": ("awq", {"qweight": None}, f"{MODULE}.qweight is missing"),
    "no zeros": ("awq", {"qzeros": None}, f"{MODULE}.qzeros is missing"),
    "codes of another type": ("int8", {"weight": torch.zeros(72, 48)}, "weight .72, 48. of torch"),
    "words of another type": ("gptq", {"qweight": torch.zeros(6, 72)}, "not a matrix of torch.int"),
    "too few scales": ("fp8", {"weight_scale_inv": torch.ones(3, 2)}, r"scales \[3, 2\]"),
    "too many groups": ("gptq", {"scales": torch.ones(9, 72)}, r"scales \[72, 9\]"),
    "other zeros": (
        "gptq-v2",
        {"qzeros": torch.zeros(6, 8, dtype=torch.int32)},
        r"zero points \[64, 6\] for scales \[72, 6\]",
    ),
    "another shape": ("int4", {"weight_shape": torch.tensor([72, 40])}, "for a shape of"),
    "a group that is not there": (
        "int4-act-order",
        {"weight_g_idx": torch.full((48,), 6)},
        "weight_g_idx .48. for 48 inputs in 6 groups",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_parts_that_do_not_fit_are_named(case: str, tmp_path: Path) -> None:
    name, changes, message = DAMAGED[case]
    parts, _ = one_weight(name, OUTPUTS, INPUTS)
    kept = {part: held for part, held in (parts | changes).items() if held is not None}
    checkpoint = checkpoint_of(tmp_path, name, kept)
    with pytest.raises(InvalidCheckpoint, match=message):
        checkpoint.copy(f"{MODULE}.weight", torch.empty(OUTPUTS, INPUTS))
