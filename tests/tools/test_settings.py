"""Configs of DeepSpeed's and Accelerate's: what becomes of each key, and the plan of one."""

import json
from pathlib import Path

import pytest
import torch

import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import UserError
from zeroshard.integrations.config_keys import ACCELERATE, DEEPSPEED
from zeroshard.integrations.settings import settings

PAGE = Path(__file__).parents[2] / "docs" / "configs.md"
BF16, FP16 = torch.bfloat16, torch.float16

# What users have: HuggingFace's own example for ZeRO-3 with offload, every "auto" of it.
HF_ZERO3 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip

# As `accelerate config` writes it.
FSDP2_YAML = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, LlamaRMSNorm
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def zero(**section):
    return settings({"zero_optimization": {"stage": 2, **section}})


# -------------------------------------------------------------------------------------------------------------- reading


def test_the_example_of_the_trainer_with_its_autos():
    found = settings(HF_ZERO3)
    assert found == {
        "stage": 3,
        "offload": Offload(parameters="cpu", gradients="cpu", optimizer="cpu"),
        "comm": Comm(overlap=True),
    }
    assert found.loop["optimizer"] == {
        "type": "AdamW",
        "lr": "auto",
        "betas": "auto",
        "eps": "auto",
        "weight_decay": "auto",
    }
    filled = {note.partition(" ")[0] for note in found.notes}
    assert filled == {
        "fp16.enabled", "bf16.enabled", "zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size",
        "gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu",
    }  # fmt: skip
    assert (
        found.ignored["zero_optimization.stage3_param_persistence_threshold"]
        == "every parameter is sharded, and gathered with its unit"
    )


def test_a_config_of_deepspeeds(tmp_path):
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 12, "loss_scale_window": 500},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": 5e8,
            "allgather_bucket_size": 1 << 20,
            "stage3_prefetch_bucket_size": 0,
            "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    found = zeroshard.settings(path)
    assert found == {
        "stage": 3,
        "precision": Precision(
            param_dtype=FP16, reduce_dtype=torch.float32, grad_dtype=torch.float32, cast_inputs=True
        ),
        "offload": Offload(parameters="nvme", gradients="cpu", optimizer="nvme", path="/nvme"),
        "layout": Layout(bucket_mib=2.0),  # 2^20 elements of 2 bytes
        "comm": Comm(overlap=False, prefetch=0),
    }
    assert found.loop == {
        "batch": 64, "micro_batch": 4, "accumulate": 8, "clip": 0.5, "optimizer": {"type": "AdamW", "lr": 1e-3},
        "scaler": {"init_scale": 4096.0, "growth_interval": 500},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.3}}, {"offload": Offload(optimizer=0.3, gradients="cpu")}),
        ({"offload_optimizer": {"device": "none"}, "offload_param": None}, {}),
        ({"cpu_offload": True}, {"offload": Offload(optimizer="cpu", gradients="cpu")}),
        ({"overlap_comm": None, "zero_quantized_weights": False, "zero_hpz_partition_size": 1}, {}),
        ({"reduce_bucket_size": 1 << 20}, {"layout": Layout(bucket_mib=4.0)}),
    ],
)
def test_sections_for_offload_and_what_is_switched_off(section, expected):
    assert zero(**section) == {"stage": 2, **expected}


def test_precisions_of_deepspeeds():
    low = settings({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}})
    assert low["precision"] == Precision(param_dtype=BF16, master_dtype=BF16, grad_dtype=BF16) and low["stage"] == 0
    assert settings({"bf16": {"enabled": True, "check_grad_overflow": True}})["precision"].nonfinite == "skip"
    assert settings({"torch_autocast": {"enabled": True, "dtype": "float16"}}).loop == {"autocast": FP16}
    assert settings({"fp16": {"enabled": True, "loss_scale": 128}}).loop == {"loss_scale": 128.0}
    assert settings({"zero_optimization": True}) == {"stage": 1}  # an old spelling


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zero_optimization": {"stge": 3}}, "zero_optimization.stge.*did you mean 'stage'"),
        ({"zero_optimizations": {"stage": 3}}, "did you mean 'zero_optimization'"),
        ({"zero_optimization": {"stage": 4}}, "expected: 0, 1, 2 or 3.*got: 4"),
        ({"zero_optimization": {"stage": "auto"}}, 'is "auto", and no trainer fills it in.*zero_optimization.stage'),
        ({"zero_optimization": {"overlap_comm": "yes"}}, "overlap_comm.*expected: true or false.*got: 'yes'"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "a number, 0 or more"),
        ({"zero_optimization": [3]}, "a section is a map"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "none or cpu or nvme"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "no folder is named"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, 'which rounds otherwise.*reduce="int8"'),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "Comm.replicas"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
        ({"tensor_parallel": {"autotp_size": 2}}, "Tensors are not split here.*parallelize_module"),
        ({"prescale_gradients": True}, "averaged once"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "the dtype of its masters"),
        ({"distributed_type": "MEGATRON_LM"}, "expected: NO or MULTI_GPU"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_param": True}}, "did you mean 'fsdp_offload_params'"),
        ({"distributed_type": "FSDP", "mixed_precision": "fp8"}, "torchao"),
        ({"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_tp_size": 2}}, "Tensors and sequences are not split"),
        ({"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_reshard_after_forward": True}}, "another kind of run"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD"}}, "FULL_SHARD"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_key(config, says):
    with pytest.raises(UserError, match=f"(?s){says}"):
        settings(config)


@pytest.mark.parametrize(
    ("strategy", "stage", "comm"),
    [
        ("FULL_SHARD", 3, {}),
        ("1", 3, {}),
        ("SHARD_GRAD_OP", 3, {"release_after_forward": False}),
        ("NO_SHARD", 0, {}),
        ("HYBRID_SHARD", 3, {"replicas": 4}),
        ("HYBRID_SHARD_ZERO2", 3, {"release_after_forward": False, "replicas": 4}),
    ],
)
def test_strategies_of_fsdp1(strategy, stage, comm):
    section = {"fsdp_version": 1, "fsdp_sharding_strategy": strategy, "fsdp_backward_prefetch": "BACKWARD_PRE"}
    found = settings({"distributed_type": "FSDP", "num_machines": 4, "mixed_precision": False, "fsdp_config": section})
    assert found == {"stage": stage, "comm": Comm(**comm)}


def test_a_yaml_of_accelerates(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "accelerate.yaml").write_text(FSDP2_YAML)
    found = zeroshard.settings(tmp_path / "accelerate.yaml")
    assert found == {
        "stage": 3,
        "precision": Precision(param_dtype=BF16, reduce_dtype=BF16, cast_inputs="units"),
        "offload": Offload(parameters="cpu", gradients="cpu", optimizer="cpu"),
        "layout": Layout(units=["LlamaDecoderLayer", "LlamaRMSNorm"], recompute=True),
        "comm": Comm(release_after_forward=False, replicas=2),
    }
    assert found.loop == {"ranks": 16, "machines": 2} and found.notes == []


def test_the_other_kinds_of_accelerates(tmp_path):
    section = {
        "zero_stage": 2,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "gradient_accumulation_steps": 4,
    }
    found = settings({"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": section})
    assert found == {
        "stage": 2,
        "precision": Precision(param_dtype=BF16),
        "offload": Offload(optimizer="cpu", gradients="cpu"),
    }
    assert found.loop == {"accumulate": 4}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}))
    inner = settings(
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(tmp_path / "ds.json")}}
    )
    assert inner == {"stage": 1} and inner.loop == {"clip": 1.0}
    section = {
        "zero_stage": 3,
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": "/nvme",
        "offload_param_device": "nvme",
        "offload_param_nvme_path": "/nvme",
        "gradient_clipping": 1.0,
    }
    found = settings({"distributed_type": "DEEPSPEED", "deepspeed_config": section})
    assert found == {
        "stage": 3,
        "offload": Offload(parameters="nvme", gradients="cpu", optimizer="nvme", path="/nvme"),
    }
    assert found.loop == {"clip": 1.0}
    whole = settings({"distributed_type": "FSDP", "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}})
    assert whole == {"stage": 3, "layout": Layout(units=[])}
    plain = settings({"distributed_type": "MULTI_GPU", "mixed_precision": "fp16", "num_processes": 8})
    assert plain == {"stage": 0} and plain.loop["autocast"] == FP16 and plain.loop["scaler"]["init_scale"] == 65536.0


def test_reading_a_file_executes_nothing(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "a.yaml"
    path.write_text(f"distributed_type: !!python/object/apply:os.mkdir ['{tmp_path / 'ran'}']\n")
    with pytest.raises(UserError, match="not plain YAML"):
        settings(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", '{"bf16": {"enabled": true}, "bf16": {}}', "there twice"),
        ("a.json", '{"bf16": {} // on\n}', "is not JSON"),
        ("a.json", "[1]", "a map of keys"),
        ("a.json", " " * (1 << 20) + "{}", "too long"),
        ("b.json", None, "cannot be read"),
    ],
)
def test_files_that_are_no_configs(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=says):
        settings(tmp_path / name)


def test_the_settings_shard_a_model():
    found = settings({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    model = torch.nn.Linear(4, 4)
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), **found)
    assert sharded.stage == 2 and model.weight.dtype == BF16


# ------------------------------------------------------------------------------------------------------------- the table


TABLES = {"DeepSpeed": DEEPSPEED, "Accelerate": ACCELERATE}


def markdown(table):
    """The rows of the page: keys that are mapped, then those refused with what to write; one row for one answer."""
    rows = {}
    for how in ("mapped", "refused"):
        for key, entry in table.items():
            if entry.how == how:
                instead = entry.says.partition(". ")[2]
                lower = instead[:1].lower() + instead[1:]
                says = entry.says if how == "mapped" else f"refused: {lower}"
                rows.setdefault(says, []).append(f"`{key}`")
    lines = [f"| {', '.join(keys)} | {says} |\n" for says, keys in rows.items()]
    return "".join(["| key | with zeroshard |\n", "|---|---|\n", *lines])


@pytest.mark.parametrize("title", TABLES)
def test_the_page_has_the_table_of_the_code(title):
    """Written by `python tests/tools/test_settings.py`."""
    assert f"<!-- {title} -->\n{markdown(TABLES[title])}<!-- end of {title} -->" in PAGE.read_text()


def test_every_key_that_is_not_on_the_page_is_ignored_with_its_reason():
    for table in TABLES.values():
        for key, entry in table.items():
            assert (f"`{key}`" in PAGE.read_text()) == (entry.how != "ignored") and entry.says, key


# ------------------------------------------------------------------------------------------------------------- commands


def test_a_config_is_planned_as_its_options_would_be(tmp_path, command):
    config = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 4,
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    options = ["--stage", 2, "--offload-optimizer", "cpu", "--offload-gradients", "cpu", "--accumulate", 4]
    model = ["plan", "--params", "7B", "--ranks", 8, "--json"]
    assert command(*model, "--config", path) == command(*model, *options)
    (code, out, _) = command(*model, "--config", path, "--stage", 3)  # what the command line says counts
    assert code == 0 and [stage["stage"] for stage in json.loads(out)["stages"]] == [3]
    del config["bf16"]
    path.write_text(json.dumps(config))
    assert command(*model, "--config", path) == command(*model, *options, "--preset", "fp32")
    path.write_text('{"zero_optimization": {"stag": 1}}')
    code, out, said = command(*model, "--config", path)
    assert (code, out, said.count("\n")) == (2, "", 1) and "did you mean 'stage'" in said


if __name__ == "__main__":
    page = PAGE.read_text()
    for title, table in TABLES.items():
        before, begin, rest = page.partition(f"<!-- {title} -->\n")
        page = f"{before}{begin}{markdown(table)}<!-- end of {title} -->{rest.partition(f'<!-- end of {title} -->')[2]}"
    PAGE.write_text(page)
