"""Conversion: every form gives the same bytes, and every kind of damaged folder gives a clear error and no output."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, FORMS, TINY, random_model, save, tiny_checkpoint, tiny_model, tiny_text_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hybridtrt.converters.checkpoint import FORMAT, load_checkpoint, weight_layouts
from hybridtrt.converters.convert import convert
from hybridtrt.converters.safetensors_file import Layout
from hybridtrt.converters.safetensors_writer import write_safetensors

INDEX = "model.safetensors.index.json"
WRONG_VALUES: tuple[Any, ...] = (None, True, "x", 0, 1, 2, 3, -1, 7.5, 1e400, 10**30, [], [1], ["x"], {}, {"a": 1})


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder: Path, match: str) -> str:
    """Conversion fails with one line, and nothing is left behind."""
    out = folder.parent / "out"
    before = set(folder.parent.iterdir())
    with pytest.raises(ValueError, match=match) as error:
        convert(folder, out)
    assert set(folder.parent.iterdir()) == before
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def jamba(tmp_path: Path) -> Path:
    return copied(tiny_checkpoint("jamba"), tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return copied(tiny_checkpoint("jamba", "sharded"), tmp_path / "model")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_gives_the_same_bytes(family: str, tmp_path: Path) -> None:
    results = []
    for form in (*FORMS, "hub"):
        out = tmp_path / f"{form}-{len(results)}"
        convert(tiny_checkpoint(family, form), out)
        results.append(files_of(out))
    assert len(list(tiny_checkpoint(family, "sharded").glob("*.safetensors"))) > 3
    assert set(results[0]) == {"config.json", "rank0.safetensors"}
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_of_matrices_and_of_sensitive_weights(family: str, dtype: str, tmp_path: Path) -> None:
    config = convert(tiny_checkpoint(family), tmp_path / "exact")
    exact = load_checkpoint(tmp_path / "exact")
    assert config.dtype == "float32"
    assert convert(tiny_checkpoint(family), tmp_path / "out", dtype).dtype == dtype
    checkpoint = load_checkpoint(tmp_path / "out")
    for name, spec in checkpoint.config.weight_table().items():
        stored = torch.float32 if spec.full_precision else getattr(torch, dtype)
        assert torch.equal(checkpoint.tensor(name), exact.tensor(name).to(stored))
        assert checkpoint.tensor(name).dtype == stored
    assert {layout.dtype for layout in weight_layouts(checkpoint.config).values()} == {"float32", dtype}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_default_dtype_is_the_models_own(dtype: str, tmp_path: Path) -> None:
    model = random_model("qwen3_next", TINY["qwen3_next"]).to(getattr(torch, dtype))
    folder = save(model, tmp_path / "model")
    assert convert(folder, tmp_path / "out").dtype == dtype
    for spelling in ({"torch_dtype": dtype}, {}):
        values = json.loads((folder / "config.json").read_text())
        del values["dtype"]
        (folder / "config.json").write_text(json.dumps(values | spelling))
        assert convert(folder, tmp_path / "again").dtype == dtype
        assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
        (folder / "config.json").write_text(json.dumps(values | {"dtype": dtype}))
    weight = load_checkpoint(tmp_path / "out").tensor("final_norm.weight")
    assert torch.equal(weight, model.model.norm.weight.float() + 1)


def test_value_that_does_not_fit_float16(jamba: Path) -> None:
    change_tensors(jamba, lambda tensors: tensors["lm_head.weight"].view(-1)[5].fill_(1e5))
    with pytest.raises(ValueError, match=r"lm_head\.weight: a value of magnitude 100000 does not fit float16"):
        convert(jamba, jamba.parent / "out", "float16")
    with pytest.raises(ValueError, match="dtype='int8' is not one of"):
        convert(jamba, jamba.parent / "out", "int8")
    assert [path.name for path in jamba.parent.iterdir()] == ["model"]


def test_config_has_tensorrt_llms_fields_and_the_written_out_layers(tmp_path: Path) -> None:
    convert(tiny_checkpoint("qwen3_next"), tmp_path / "out")
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    assert data["producer"]["name"] == "hybridtrt"
    assert data["architecture"] == "qwen3_next"
    assert (data["dtype"], data["hidden_size"], data["vocab_size"], data["num_hidden_layers"]) == ("float32", 32, 96, 4)
    assert data["layer_types"] == ["gated_delta"] * 3 + ["attention"]
    assert data["mapping"]["world_size"] == 1
    assert data["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": None}


def test_tokenizer_is_copied_if_there_is_one(tmp_path: Path) -> None:
    model = copied(tiny_text_checkpoint("jamba"), tmp_path / "model")
    (model / "modeling_jamba.py").write_text("raise SystemExit\n")
    convert(model, tmp_path / "out")
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in (tmp_path / "out" / "tokenizer").iterdir()} == names
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.tokenizer_dir == tmp_path / "out" / "tokenizer"
    convert(tiny_checkpoint("jamba"), tmp_path / "out")
    assert load_checkpoint(tmp_path / "out").tokenizer_dir is None


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = convert(
        tiny_checkpoint("jamba"), tmp_path / "out", progress=lambda done, total: seen.append((done, total))
    )
    total = sum(layout.num_bytes for layout in weight_layouts(config).values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_an_older_checkpoint_is_replaced_only_by_a_whole_one(jamba: Path) -> None:
    out = jamba.parent / "out"
    convert(jamba, out)
    before = files_of(out)

    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(jamba, out, "bfloat16", fail)
    assert files_of(out) == before
    assert {path.name for path in jamba.parent.iterdir()} == {"model", "out"}
    convert(jamba, out, "bfloat16")
    assert load_checkpoint(out).config.dtype == "bfloat16"
    assert {path.name for path in jamba.parent.iterdir()} == {"model", "out"}


def test_anything_else_in_the_way_is_left_alone(jamba: Path) -> None:
    out = jamba.parent / "out"
    out.mkdir()
    convert(jamba, out)  # an empty folder is no loss
    before = files_of(jamba.parent)
    foreign = copied(jamba, jamba.parent / "foreign")
    for target in (foreign, foreign / "config.json"):
        with pytest.raises(ValueError, match="exists and was not written by hybridtrt"):
            convert(jamba, target)
    shutil.rmtree(foreign)
    for target in (jamba, jamba.parent):
        with pytest.raises(ValueError, match="holds the model itself"):
            convert(jamba, target)
    assert files_of(jamba.parent) == before
    inside = copied(jamba, out / "model")
    with pytest.raises(ValueError, match="holds the model itself"):
        convert(inside, out)
    with pytest.raises(ValueError, match="no such folder"):
        convert(jamba.parent / "nowhere", out)
    convert(jamba, jamba / "deep" / "out")
    load_checkpoint(jamba / "deep" / "out")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["hub", "packed"])
def test_each_tensor_is_missed(family: str, form: str, tmp_path: Path) -> None:
    model = copied(tiny_checkpoint(family, form), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        save_file({other: tensors[other] for other in tensors if other != name}, model / "model.safetensors")
        assert re.search(rf"missing tensor (\S+ or )?{re.escape(name)} ", refused(model, "missing tensor"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["hub", "packed"])
def test_each_tensor_has_its_shape(family: str, form: str, tmp_path: Path) -> None:
    model = copied(tiny_checkpoint(family, form), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        wrong = torch.cat([tensor, tensor[:1]])
        save_file(tensors | {name: wrong}, model / "model.safetensors")
        message = refused(model, "has shape")
        assert f"{name} has shape {list(wrong.shape)}, expected {list(tensor.shape)} by" in message
        assert "model.safetensors" in message


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name", ["model.layers.0.extra.weight", "model.layers.9.input_layernorm.weight", "score.weight", "x"]
)
def test_surplus_tensor(family: str, name: str, tmp_path: Path) -> None:
    model = copied(tiny_checkpoint(family), tmp_path / "model")
    change_tensors(model, lambda tensors: tensors.update({name: torch.zeros(2)}))
    refused(model, f"surplus tensor {name} ")


def test_both_spellings_of_the_experts_at_once(jamba: Path) -> None:
    packed = load_file(tiny_checkpoint("jamba", "packed") / "model.safetensors")
    change_tensors(jamba, lambda tensors: tensors.update(packed))
    refused(jamba, r"surplus tensor model\.layers\.1\.feed_forward\.experts\.0\.")


def test_known_surplus_is_ignored_by_name(tmp_path: Path) -> None:
    model = copied(tiny_checkpoint("qwen3_next"), tmp_path / "model")
    extra = {"mtp.layers.0.input_layernorm.weight": torch.zeros(2), "model.rotary_emb.inv_freq": torch.zeros(2).long()}
    change_tensors(model, lambda tensors: tensors.update(extra))
    convert(model, tmp_path / "out")
    convert(tiny_checkpoint("qwen3_next"), tmp_path / "expected")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")


def test_pattern_that_contradicts_the_weights(tmp_path: Path) -> None:
    model = copied(tiny_checkpoint("qwen3_next"), tmp_path / "model")
    change_json(model / "config.json", layer_types=["linear_attention", "full_attention"] * 2)
    message = refused(model, "layer 1 does not match its weights")
    assert "missing tensor model.layers.1.self_attn." in message
    assert "surplus tensor model.layers.1.linear_attn." in message
    assert "config.json" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_dtype_that_cannot_be_converted(dtype: torch.dtype, jamba: Path) -> None:
    name = "model.layers.0.mamba.in_proj.weight"
    change_tensors(jamba, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refused(jamba, rf"{name} has dtype \w+, expected F32, BF16, F16")


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_tied_and_untied(family: str, tmp_path: Path) -> None:
    tied = save(random_model(family, TINY[family] | {"tie_word_embeddings": True}), tmp_path / "model")
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    convert(tied, tmp_path / "tied")
    assert "lm_head.weight" not in load_checkpoint(tmp_path / "tied").config.weight_table()

    change_tensors(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    convert(tied, tmp_path / "equal")
    assert files_of(tmp_path / "equal") == files_of(tmp_path / "tied")

    change_tensors(tied, lambda t: t["lm_head.weight"].view(-1)[-1].add_(1e-3))
    message = refused(tied, r"lm_head\.weight differs from model\.embed_tokens\.weight")
    assert "tie_word_embeddings is true" in message
    change_tensors(tied, lambda t: t.update({"lm_head.weight": torch.zeros(3, 32)}))
    refused(tied, r"lm_head\.weight has shape \[3, 32\], expected \[96, 32\]")

    change_tensors(tied, lambda t: t.pop("lm_head.weight"))
    change_json(tied / "config.json", tie_word_embeddings=False)
    refused(tied, r"missing tensor lm_head\.weight")


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncated_file(data: st.DataObject, tmp_path: Path) -> None:
    model = tmp_path / "model"
    if not model.exists():
        copied(tiny_checkpoint("jamba"), model)
    whole = (tiny_checkpoint("jamba") / "model.safetensors").read_bytes()
    length = data.draw(st.one_of(st.integers(0, 20_000), st.integers(0, len(whole) - 1)))
    (model / "model.safetensors").write_bytes(whole[:length])
    refused(model, r"model\.safetensors: truncated or damaged safetensors file")


def test_index_names_a_shard_that_is_not_there(sharded: Path) -> None:
    (sharded / "model-00002-of-00010.safetensors").unlink()
    refused(sharded, rf"model-00002-of-00010\.safetensors: no such file, but {INDEX} names it")


def test_shard_holds_what_the_index_puts_elsewhere(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    name = "model.final_layernorm.weight"
    other = next(file for file in sorted(set(index.values())) if file != index[name])
    change_json(sharded / INDEX, weight_map=index | {name: other})
    refused(sharded, rf"{index[name]}: holds the tensor {name}, but {INDEX} puts it in {other}")
    change_json(sharded / INDEX, weight_map={key: file for key, file in index.items() if key != name})
    refused(sharded, rf"{index[name]}: holds the tensor {name}, but {INDEX} does not list it")
    change_json(sharded / INDEX, weight_map=index | {"ghost": other})
    refused(sharded, rf"{other}: lacks the tensor ghost, which {INDEX} puts there")


def test_tensor_in_two_files(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    convert(sharded, sharded.parent / "no-index")  # shards without an index are whole all the same
    shutil.rmtree(sharded.parent / "no-index")
    shutil.copy(sharded / "model-00001-of-00010.safetensors", sharded / "model-00011-of-00010.safetensors")
    refused(sharded, r"model-00011-of-00010\.safetensors: holds the tensor .*, but so does model-00001-of-00010")


@pytest.mark.parametrize("form", ["hub", "sharded"])
def test_stray_file(form: str, tmp_path: Path) -> None:
    model = copied(tiny_checkpoint("jamba", form), tmp_path / "model")
    save_file({"x": torch.zeros(1)}, model / "extra.safetensors")
    refused(model, r"extra\.safetensors: stray file")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}']
)
def test_damaged_index(text: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    refused(sharded, rf"{INDEX}: (is no index|weight_map has)")


def test_folder_without_weights(jamba: Path) -> None:
    (jamba / "model.safetensors").unlink()
    refused(jamba, r"no \*\.safetensors file")
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        (jamba / name).write_bytes(b"\x80\x04crm -rf /")
        refused(jamba, rf"{name}: pickle files are never loaded")
        (jamba / name).unlink()
    (jamba / "config.json").unlink()
    refused(jamba, r"config\.json: cannot be read")


def test_links_as_in_the_hub_cache(jamba: Path) -> None:
    links = jamba.parent / "links"
    links.mkdir()
    for path in jamba.iterdir():
        os.symlink(path, links / path.name)
    convert(links, jamba.parent / "out")
    load_checkpoint(jamba.parent / "out")


@pytest.mark.parametrize("family", FAMILIES)
def test_any_wrong_config_value_is_refused_or_converted_whole(family: str, tmp_path: Path) -> None:
    model = copied(tiny_checkpoint(family), tmp_path / "model")
    text = (model / "config.json").read_text()
    values = json.loads(text)
    converted = 0
    for key in values:
        wrongs = [{name: value for name, value in values.items() if name != key}]
        wrongs += [values | {key: wrong} for wrong in WRONG_VALUES]
        for wrong in wrongs:
            (model / "config.json").write_text(json.dumps(wrong))
            try:
                config = convert(model, tmp_path / "out")
            except ValueError:
                continue
            assert load_checkpoint(tmp_path / "out").config == config
            converted += 1
    assert converted > 20  # keys that do not matter here


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    convert(tiny_checkpoint("granitemoehybrid"), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_weights_of_a_checkpoint_are_those_of_the_model(checkpoint: Path) -> None:
    loaded = load_checkpoint(checkpoint)
    model = tiny_model("granitemoehybrid")
    assert torch.equal(loaded.tensor("embedding.weight"), model.model.embed_tokens.weight)
    packed = model.model.layers[0].block_sparse_moe.experts.gate_up_proj
    assert torch.equal(loaded.tensor("layers.0.moe.experts.gate_up"), packed)
    assert set(load_file(checkpoint / "rank0.safetensors")) == set(loaded.config.weight_table())
    data_start = 8 + int.from_bytes((checkpoint / "rank0.safetensors").read_bytes()[:8], "little")
    assert data_start % 64 == 0


def test_checkpoint_that_is_foreign_or_of_another_format(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    good = path.read_text()
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        load_checkpoint(checkpoint / "nowhere")
    for producer in (None, {"name": "modelopt"}, "hybridtrt"):
        path.write_text(json.dumps(json.loads(good) | {"producer": producer}))
        with pytest.raises(ValueError, match="is not a checkpoint of hybridtrt"):
            load_checkpoint(checkpoint)
    path.write_text(json.dumps(json.loads(good) | {"format": FORMAT + 1}))
    with pytest.raises(ValueError, match=f"has checkpoint format {FORMAT + 1}, expected {FORMAT}; convert it again"):
        load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="is not a checkpoint of hybridtrt"):
        load_checkpoint(tiny_checkpoint("jamba"))


def test_checkpoint_with_damaged_weights(checkpoint: Path) -> None:
    path = checkpoint / "rank0.safetensors"
    good = load_file(path)
    name = "layers.0.mamba2.in_proj.weight"
    damaged = {
        "as F32": good | {name: good[name].T.contiguous()},
        "as BF16": good | {name: good[name].bfloat16()},
        f"no weight {name}": {key: value for key, value in good.items() if key != name},
        "a surplus weight x": good | {"x": torch.zeros(1)},
    }
    for message, tensors in damaged.items():
        save_file(tensors, path)
        with pytest.raises(ValueError, match=message):
            load_checkpoint(checkpoint)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_checkpoint(checkpoint)
    path.unlink()
    with pytest.raises(ValueError, match=r"rank0\.safetensors: no such file"):
        load_checkpoint(checkpoint)


def test_checkpoint_with_any_damaged_value_in_its_config(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    good = json.loads(path.read_text())
    places = list(_places(good))
    assert len(places) > 100
    for place in places:
        for wrong in (*WRONG_VALUES, "drop"):
            if place[0] == "producer" and place[-1] == "version":
                continue  # any version of the same format will do
            damaged = json.loads(json.dumps(good))
            parent = damaged
            for step in place[:-1]:
                parent = parent[step]
            if wrong == "drop":
                del parent[place[-1]]
            elif parent[place[-1]] == wrong:
                continue
            else:
                parent[place[-1]] = wrong
            path.write_text(json.dumps(damaged))
            try:
                load_checkpoint(checkpoint)
            except ValueError as error:
                assert "\n" not in str(error)  # noqa: PT017
            else:  # a number that no shape depends on
                assert place[0] == "model", place


def _places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def test_writer_refuses_pieces_that_do_not_fill_a_tensor(tmp_path: Path) -> None:
    layouts = {"a": Layout((2, 3), "float32")}
    for pieces in ([torch.zeros(5)], [torch.zeros(2, 3), torch.zeros(1)], []):
        with pytest.raises(ValueError, match=r"a: \d+ bytes"):
            write_safetensors(tmp_path / "x", layouts, lambda name, pieces=pieces: pieces)


def test_writer_aligns_every_tensor_to_its_elements(tmp_path: Path) -> None:
    layouts = {"half": Layout((3,), "bfloat16"), "none": Layout((0,), "float32"), "full": Layout((2,), "float32")}
    write_safetensors(tmp_path / "x", layouts, lambda name: [torch.ones(layouts[name].shape)])
    stored = load_file(tmp_path / "x")
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == {
        "half": ((3,), torch.bfloat16),
        "none": ((0,), torch.float32),
        "full": ((2,), torch.float32),
    }
    raw = (tmp_path / "x").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["full"]["data_offsets"] == [0, 8]
    assert header["half"]["data_offsets"] == [8, 14]
