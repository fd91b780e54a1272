"""The table of all keys of DeepSpeed's and Accelerate's configs, which the reader uses and the documents show.

A key is mapped (to a policy of `shard`, or to what the training loop does itself), ignored for a reason, or refused with
what to write instead. A key that is not here is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .config_values import (
    Draft,
    Key,
    count,
    dtype,
    fact,
    flag,
    ignored,
    loop,
    number,
    one_of,
    policy,
    positive,
    refused,
    text,
    wrong,
)

DEVICES = {"none": "device", "cpu": "cpu", "nvme": "nvme"}
REMOVED = "DeepSpeed itself has taken this out"
FILES = "files are read ahead and written behind by threads of their own"
SHARDED = "every parameter is sharded, and gathered with its unit"
YOURS = "the loop and its tools are yours"
LAUNCHER = "`torchrun`, or whatever launches, says so"


def _stage(draft: Draft, key: str, value: Any) -> int:
    if value not in (0, 1, 2, 3) or isinstance(value, (bool, str)):
        raise wrong(draft, key, value, "0, 1, 2 or 3")
    return int(value)


def _device(draft: Draft, key: str, value: Any) -> str:
    return str(one_of(draft, key, value, DEVICES))


def _old_offload(draft: Draft, key: str, value: Any) -> str:
    return "cpu" if flag(draft, key, value) else "device"


def _gathers_ahead(draft: Draft, key: str, value: Any) -> int:
    return min(1, count(draft, key, value))


def _overflow(draft: Draft, key: str, value: Any) -> str:
    return "skip" if flag(draft, key, value) else "ignore"


def _ratio(draft: Draft, key: str, value: Any) -> float:
    if number(draft, key, value) > 1:
        raise wrong(draft, key, value, "a fraction from 0 to 1")
    return float(value)


def _offload(state: str, name: str) -> dict[str, Key]:
    into = f"zero_optimization.{name}."
    pool = ignored("memory for files' buffers is taken by the size of the buckets")
    return {
        f"{into}device": fact(state, _device, f"`Offload({state}=...)`", auto=False),
        f"{into}nvme_path": fact(f"{state}_path", text, "`Offload(path=...)`; one folder for all states"),
        f"{into}pin_memory": ignored("host memory is pinned where there is a GPU"),
        f"{into}buffer_count": pool,
    }


ZERO = {
    "stage": fact("stage", _stage, "`stage=`", auto=False),
    "reduce_bucket_size": fact(
        "reduce_elements", count, "`Layout(bucket_mib=...)`: elements times bytes per parameter; the smaller of this key and the next one"
    ),
    "allgather_bucket_size": fact("gather_elements", count, "as `reduce_bucket_size`: zeroshard reduces and gathers the same buckets"),
    "overlap_comm": policy("comm", "overlap", flag, "`Comm(overlap=...)`"),
    "contiguous_gradients": ignored("gradients are always contiguous in their bucket"),
    "reduce_scatter": ignored("what is sharded is reduced to its owner only"),
    "use_multi_rank_bucket_allreduce": ignored("as `reduce_scatter`"),
    "allgather_partitions": ignored("updated parameters are always gathered by buckets"),
    "round_robin_gradients": ignored("shards are even by elements"),
    "parameter_alignment": ignored("`Layout(align=...)` is its like; 128 elements, unless you say so"),
    "compute_grad_norm": ignored("a norm is computed where `clip_grad_norm_` is called"),
    "load_from_fp32_weights": ignored("a checkpoint holds masters, and masters are loaded"),
    "elastic_checkpoint": ignored("every checkpoint loads at any number of ranks"),
    "sub_group_size": ignored("states in files are stepped bucket by bucket"),
    "cpu_offload": fact("optimizer", _old_offload, '`Offload(optimizer="cpu", gradients="cpu")`'),
    "cpu_offload_param": fact("parameters", _old_offload, '`Offload(parameters="cpu")`'),
    "cpu_offload_use_pin_memory": ignored("host memory is pinned where there is a GPU"),
    "stage3_prefetch_bucket_size": policy(
        "comm", "prefetch", _gathers_ahead, "0: `Comm(prefetch=0)`; any other size: `Comm(prefetch=1)`, one unit ahead"
    ),
    "stage3_param_persistence_threshold": ignored(SHARDED),
    "stage3_model_persistence_threshold": ignored(SHARDED),
    "stage3_max_live_parameters": ignored("a unit is released once it is used"),
    "stage3_max_reuse_distance": ignored("a unit is released once it is used; `Comm(release_after_forward=False)` keeps it"),
    "stage3_gather_16bit_weights_on_model_save": ignored("`zero.export(folder, dtype=...)` writes whole weights"),
    "stage3_gather_fp16_weights_on_model_save": ignored("`zero.export(folder, dtype=...)` writes whole weights"),
    "stage3_module_granularity_threshold": ignored("units are blocks, not leaves; `Layout(units=...)`"),
    "stage3_use_all_reduce_for_fetch_params": ignored("parameters are gathered by buckets"),
    "stage3_allgather_sequential": ignored("parameters are gathered by buckets; `Layout(bucket_mib=...)` bounds them"),
    "ignore_unused_parameters": ignored("a parameter without a gradient counts as zero, and is no error"),
    "legacy_stage1": ignored("there is one engine for all stages"),
    "leaf_module": ignored("a unit is gathered whole, whichever of its experts a batch uses"),
    "memory_efficient_linear": ignored("gathered weights are not kept for backward"),
    "override_module_apply": ignored("weights to initialise are on meta, or whole"),
    "pipeline_loading_checkpoint": ignored(FILES),
    "enable_sanity_checks": ignored("`zero.check_replicas()`, and every `zero.save`, compare the ranks"),
    "log_trace_cache_warnings": ignored("the order of gathers is agreed on, not guessed"),
    "save_muon_momentum_buffer_in_memory": ignored("`Offload(optimizer=...)` says where states rest"),
    "zero_hpz_partition_size": refused(
        "A second copy of the parameters inside each node is not there", "`Comm(replicas=...)` keeps gathers inside a node", 1
    ),
    "zero_quantized_weights": refused(
        "Weights are not sent in fewer bits than they rest in", "`Precision(fp8=True)` stores and sends weights in 8 bits", False
    ),
    "zero_quantized_nontrainable_weights": refused("Frozen weights are sent as they are", "Leave it out", False),
    "zero_quantized_gradients": refused(
        "Its bits are not DeepSpeed's, which rounds otherwise", "`Comm(reduce=\"int8\")` sends one byte per element", False
    ),
    "zeropp_loco_param": refused(REMOVED, "Leave it out"),
    "mics_shard_size": refused(REMOVED, "`Comm(replicas=...)`: the number of ranks divided by this size", -1),
    "mics_hierarchical_params_gather": refused(REMOVED, "`Comm(replicas=...)`", False),
    "zenflow": refused("ZenFlow updates with gradients of earlier steps, which changes the training", "Leave it out"),
}  # fmt: skip

DEEPSPEED: Mapping[str, Key] = {
    **{f"zero_optimization.{key}": entry for key, entry in ZERO.items()},
    **_offload("parameters", "offload_param"),
    "zero_optimization.offload_param.buffer_size": ignored("memory for files' buffers is taken by the size of the buckets"),
    "zero_optimization.offload_param.max_in_cpu": ignored('`Offload(parameters={"nvme": 0.7, "cpu": 0.3})` says it by fractions'),
    **_offload("optimizer", "offload_optimizer"),
    "zero_optimization.offload_optimizer.ratio": fact(
        "ratio", _ratio, "`Offload(optimizer=ratio)`: the fraction in host memory", auto=False
    ),
    "zero_optimization.offload_optimizer.pipeline_read": ignored(FILES),
    "zero_optimization.offload_optimizer.pipeline_write": ignored(FILES),
    "zero_optimization.offload_optimizer.fast_init": ignored("states in files begin as files without content"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": ignored("`OMP_NUM_THREADS` says how many cores step"),
    "zero_optimization.offload_optimizer.super_offload": refused(
        "SuperOffload is not there", '`Offload(optimizer="cpu", gradients="cpu")`', False
    ),
    "bf16.enabled": fact("bf16", flag, "`Precision(param_dtype=torch.bfloat16)`"),
    "bf16.check_grad_overflow": policy("precision", "nonfinite", _overflow, '`Precision(nonfinite="skip")`, or "ignore"'),
    "bf16.immediate_grad_update": ignored("gradients are added up as they come"),
    "bf16.bf16_master_weights_and_grads": fact("low_masters", flag, "`Precision(master_dtype=torch.bfloat16, grad_dtype=torch.bfloat16)`"),
    "bf16.bf16_optimizer_states": fact("low_states", flag, "states always have the dtype of the masters; refused if the masters are fp32"),
    "fp16.enabled": fact("fp16", flag, "`Precision(param_dtype=torch.float16)`, and a `torch.amp.GradScaler` in the loop"),
    "fp16.auto_cast": fact("fp16_casts", flag, "`Precision(cast_inputs=True)`"),
    "fp16.loss_scale": fact("loss_scale", number, "0: a `GradScaler`; else multiply the loss by this scale, and divide the gradients by it"),
    "fp16.initial_scale_power": fact("scale_power", number, "`GradScaler(init_scale=2**n)`"),
    "fp16.loss_scale_window": fact("scale_window", count, "`GradScaler(growth_interval=n)`"),
    "fp16.hysteresis": ignored("a `GradScaler` halves its scale at the first overflow"),
    "fp16.consecutive_hysteresis": ignored("a `GradScaler` halves its scale at the first overflow"),
    "fp16.min_loss_scale": ignored("a `GradScaler` has no least scale"),
    "fp16.fp16_master_weights_and_grads": fact("low_masters", flag, "`Precision(master_dtype=torch.float16, grad_dtype=torch.float16)`"),
    "torch_autocast.enabled": fact("autocast", flag, "`with torch.autocast(...)` in the loop"),
    "torch_autocast.dtype": fact("autocast_dtype", dtype, "`torch.autocast(..., dtype=...)`"),
    "torch_autocast.lower_precision_safe_modules": ignored("torch's autocast has lists of its own"),
    "communication_data_type": policy("precision", "reduce_dtype", dtype, "`Precision(reduce_dtype=...)`"),
    "data_types.grad_accum_dtype": policy("precision", "grad_dtype", dtype, "`Precision(grad_dtype=...)`"),
    "data_types.param_dtype": policy("precision", "param_dtype", dtype, "`Precision(param_dtype=...)`"),
    "data_types.buffer_dtype": refused("Buffers keep their own dtype", "Call `buffer.to(...)` before `shard`"),
    "data_types.keep_in_fp32_modules": ignored("buffers keep their own dtype"),
    "gradient_clipping": loop("clip", number, "`torch.nn.utils.clip_grad_norm_(model.parameters(), value)` in the loop"),
    "gradient_accumulation_steps": loop("accumulate", positive, "this number of backwards per step in the loop; divide each loss by this number"),
    "train_micro_batch_size_per_gpu": loop("micro_batch", positive, "your loader's batch size"),
    "train_batch_size": loop("batch", positive, "micro-batch times accumulation times ranks"),
    "optimizer.type": fact("optimizer_type", text, "make your own `torch.optim` object; `settings(...).loop` says which"),
    "optimizer.params": fact("optimizer_params", lambda _draft, _key, value: dict(value), "the arguments of your optimizer or scheduler"),
    "optimizer.legacy_fusion": ignored("the optimizer is yours"),
    "scheduler.type": fact("scheduler_type", text, "make your own scheduler; `settings(...).loop` says which"),
    "scheduler.params": fact("scheduler_params", lambda _draft, _key, value: dict(value), "the arguments of your optimizer or scheduler"),
    "aio": ignored(FILES),
    "activation_checkpointing": ignored(
        "configures `deepspeed.checkpointing`, which a model calls itself; `Layout(recompute=True)`, or torch's own"
    ),
    "zero_allow_untested_optimizer": ignored("any `torch.optim` optimizer"),
    "zero_force_ds_cpu_optimizer": ignored("the optimizer is yours, wherever its states rest"),
    "managed_gradient_accumulation": ignored(YOURS),
    "steps_per_print": ignored(YOURS),
    "wall_clock_breakdown": ignored("`zero.trace(...)`"),
    "memory_breakdown": ignored("`zero.ledger()`"),
    "dump_state": ignored("`print(zero)`, `zero.ledger()`"),
    "log_level": ignored('`logging.getLogger("zeroshard")`'),
    "disable_python_gc": ignored(YOURS),
    "dataloader_drop_last": ignored(YOURS),
    "checkpoint": ignored("`zero.save` writes all ranks or none, and loads anywhere"),
    "nebula": ignored("`zero.save(..., asynchronous=True)`"),
    "datastates_ckpt": ignored("`zero.save(..., asynchronous=True)`"),
    "prescale_gradients": refused("Gradients are averaged once, after their sum", "Leave it out", False),
    "gradient_predivide_factor": refused("Gradients are averaged once, after their sum", "Leave it out", 1, 1.0),
    "gradient_allreduce_op": refused("Gradients are averaged over the ranks", "Multiply the loss by `zero.world_size`", "mean"),
    "disable_allgather": ignored("updated parameters are always gathered by buckets"),
    "seq_parallel_communication_data_type": ignored("there is no sequence parallelism"),
    "use_data_before_expert_parallelism": ignored("the order of a DeviceMesh's axes says it"),
    "flops_profiler": ignored(YOURS),
    "comms_logger": ignored("`zero.ledger()`, `zero.trace(...)`"),
    "tensorboard": ignored("`zero.metrics()`, and a logger of yours"),
    "wandb": ignored("`zero.metrics()`, and a logger of yours"),
    "csv_monitor": ignored("`zero.metrics()`, and a logger of yours"),
    "comet": ignored("`zero.metrics()`, and a logger of yours"),
    "timers": ignored(YOURS),
    "autotuning": ignored("`zeroshard plan` answers before a run"),
    "compile": ignored("`torch.compile` is yours; before or after `shard`"),
    "elasticity": refused(REMOVED, "Resume on another number of ranks: `zero.load`"),
    "sparse_gradients": refused(REMOVED, "Use dense gradients", False),
    "sparse_attention": refused(REMOVED, "Write the attention in your model"),
    "eigenvalue": refused(REMOVED, "Leave it out"),
    "graph_harvesting": refused(REMOVED, "Leave it out", False),
    "curriculum_learning": refused("Batches are yours to choose", "Use your own sampler"),
    "progressive_layer_drop": refused("The model's forward is yours", "Drop layers in the model's forward"),
    "data_efficiency": refused("Batches are yours to choose", "Use your own sampler"),
    "quantize_training": refused("Weights are not quantized by a schedule here", "`Precision(fp8=True)`, or leave it out"),
    "compression_training": refused("Weights are not quantized or pruned here", "Leave it out"),
    "weight_quantization": refused("Weights are not quantized for inference here", "Leave it out"),
    "amp": refused("Apex is not there", "`Precision(param_dtype=torch.float16)`"),
    "hybrid_engine": refused("There is no engine of its own for generation", "`with zero.generating(): model.generate(...)`"),
    "pipeline": refused("Pipeline stages are not cut here", "Shard each stage's module over its own ranks: `Comm(group=...)`"),
    "tensor_parallel": refused("Tensors are not split here", "`parallelize_module`, and `Comm(group=mesh[\"dp\"])`"),
    "expert_parallel": refused("A config cannot name the experts", "`Layout(along={\"*.experts.*\": \"edp\"})`"),
    "sequence_parallel_size": refused("Sequences are not split here", "Leave it out", 1),
}  # fmt: skip

# --- Accelerate -------------------------------------------------------------------------------------------------------

KINDS = {
    "NO": "none",
    "MULTI_GPU": "ddp",
    "MULTI_CPU": "ddp",
    "MULTI_XPU": "ddp",
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
}
PRECISIONS = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}
# FSDP's words. What it calls SHARD_GRAD_OP shards parameters too, and only keeps them from forward to backward.
STRATEGIES = {
    "FULL_SHARD": (3, True, False),  # (stage, are they released after forward?, a copy per machine?)
    "SHARD_GRAD_OP": (3, False, False),
    "NO_SHARD": (0, True, False),
    "HYBRID_SHARD": (3, True, True),
    "HYBRID_SHARD_ZERO2": (3, False, True),
}


def _kind(draft: Draft, key: str, value: Any) -> str:
    return str(one_of(draft, key, "NO" if value is False else value, KINDS))


def _mixed(draft: Draft, key: str, value: Any) -> torch.dtype | None:
    if value == "fp8":
        raise wrong(draft, key, value, "no, fp16 or bf16", "torchao's float8 training, before `shard`")
    found: torch.dtype | None = one_of(
        draft, key, "no" if value is False else value, PRECISIONS
    )  # YAML reads a bare no so
    return found


def _strategy(draft: Draft, key: str, value: Any) -> tuple[int, bool, bool]:
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):  # version 2
        return 3, flag(draft, key, value), False
    names = dict(zip("12345", STRATEGIES, strict=True)) | {name: name for name in STRATEGIES}
    return STRATEGIES[one_of(draft, key, str(value).upper(), names)]


def _wrap(draft: Draft, key: str, value: Any) -> str:
    names = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
    return str(one_of(draft, key, str(value).upper(), {name: name for name in names}))


def _names(draft: Draft, key: str, value: Any) -> list[str]:
    return [name.strip() for name in text(draft, key, value).split(",") if name.strip()]


def _ahead(draft: Draft, key: str, value: Any) -> int:
    return int(one_of(draft, key, str(value).upper(), {"BACKWARD_PRE": 1, "BACKWARD_POST": 1, "NO_PREFETCH": 0}))


TENSOR = ("Tensors and sequences are not split here", 'split them with torch; shard with `Comm(group=mesh["dp"])`', 1)

ACCELERATE: Mapping[str, Key] = {
    "compute_environment": refused("Only runs on machines of your own are read", "`compute_environment: LOCAL_MACHINE`", "LOCAL_MACHINE"),
    "distributed_type": fact("kind", _kind, "FSDP: `stage=3`; DEEPSPEED: the stage in `deepspeed_config`; MULTI_GPU, MULTI_CPU, NO: `stage=0`", auto=False),
    "mixed_precision": fact(
        "mixed", _mixed,
        "with FSDP `Precision(param_dtype=..., reduce_dtype=..., cast_inputs=\"units\")`, with DEEPSPEED `param_dtype` alone, "
        "else `torch.autocast` in the loop; fp16 also needs a `torch.amp.GradScaler`",
    ),
    "num_processes": loop("ranks", positive, "`torchrun --nproc-per-node`; `plan --ranks`"),
    "num_machines": loop("machines", positive, "`torchrun --nnodes`"),
    **dict.fromkeys(
        ("machine_rank", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "main_training_function",
         "enable_cpu_affinity", "mpirun_config", "use_cpu", "debug", "command_file", "commands"),
        ignored(LAUNCHER),
    ),
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "downcast_bf16"), ignored("there are no TPUs")),
    "dynamo_config": ignored("`torch.compile` is yours; before or after `shard`"),
    "fp8_config": refused("products in 8 bits are not made here", "torchao's float8 training, before `shard`"),
    "megatron_lm_config": refused("Megatron's parallelism is not there", "Leave it out"),
    "parallelism_config.parallelism_config_dp_replicate_size": fact("replicas", positive, "`Comm(replicas=...)`"),
    "parallelism_config.parallelism_config_dp_shard_size": ignored("the ranks divided by `Comm(replicas=...)`"),
    **{f"parallelism_config.parallelism_config_{kind}_size": refused(*TENSOR) for kind in ("tp", "cp", "sp")},
    "parallelism_config.parallelism_config_cp_backend": ignored("sequences are not split here"),
    "parallelism_config.parallelism_config_cp_comm_strategy": ignored("sequences are not split here"),
    **{
        f"parallelism_config.parallelism_config_sp_{name}": ignored("sequences are not split here")
        for name in ("backend", "seq_length", "seq_length_is_variable", "attn_implementation")
    },
    "fsdp_config.fsdp_version": ignored("1 and 2 are read in the same way"),
    "fsdp_config.fsdp_sharding_strategy": fact(
        "strategy", _strategy, "FULL_SHARD: `stage=3`; SHARD_GRAD_OP: `stage=3` and `Comm(release_after_forward=False)`; NO_SHARD: `stage=0`; "
        "HYBRID_SHARD, HYBRID_SHARD_ZERO2: as the first two, with `Comm(replicas=machines)`", auto=False,
    ),
    "fsdp_config.fsdp_reshard_after_forward": fact(
        "strategy", _strategy, "true: `stage=3`; false: `stage=3` and `Comm(release_after_forward=False)`; in FSDP's version 1 as `fsdp_sharding_strategy`",
        auto=False,
    ),
    "fsdp_config.fsdp_offload_params": fact("all", flag, '`Offload(parameters="cpu", gradients="cpu", optimizer="cpu")`'),
    "fsdp_config.fsdp_auto_wrap_policy": fact(
        "wrap", _wrap, "TRANSFORMER_BASED_WRAP: the classes of the next key; SIZE_BASED_WRAP: zeroshard finds the units; NO_WRAP: `Layout(units=[])`"
    ),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": fact("classes", _names, '`Layout(units=["LlamaDecoderLayer"])`; without this key zeroshard finds the units'),
    "fsdp_config.fsdp_min_num_params": ignored("units are found by the model's own blocks"),
    "fsdp_config.fsdp_backward_prefetch": policy("comm", "prefetch", _ahead, "NO_PREFETCH: `Comm(prefetch=0)`; else one unit ahead, the default"),
    "fsdp_config.fsdp_forward_prefetch": ignored("`Comm(prefetch=...)` holds in both directions"),
    "fsdp_config.fsdp_activation_checkpointing": policy("layout", "recompute", flag, "`Layout(recompute=True)`"),
    "fsdp_config.fsdp_activation_checkpointing_offload": refused("A policy of its own moves activations", "`Offload(activations=\"cpu\")`", False),
    "fsdp_config.fsdp_ignored_modules": refused("Modules are not named by regular expressions", '`Layout(ignore=["name.*"])`: names of parameters'),
    "fsdp_config.fsdp_state_dict_type": ignored("`zero.save` for shards, `zero.export` for whole weights"),
    "fsdp_config.fsdp_use_orig_params": ignored("the optimizer always keeps your parameters' groups"),
    "fsdp_config.fsdp_sync_module_states": ignored("rank 0's weights always count"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": ignored("a model on meta but on one rank gets that rank's weights; `zeroshard.load(model, folder)` reads each rank its own parts"),
    "deepspeed_config.zero_stage": fact("stage", _stage, "`stage=`", auto=False),
    "deepspeed_config.offload_optimizer_device": fact("optimizer", _device, "`Offload(optimizer=..., gradients=\"cpu\")`", auto=False),
    "deepspeed_config.offload_param_device": fact("parameters", _device, "`Offload(parameters=...)`", auto=False),
    "deepspeed_config.offload_optimizer_nvme_path": fact("optimizer_path", text, "`Offload(path=...)`"),
    "deepspeed_config.offload_param_nvme_path": fact("parameters_path", text, "`Offload(path=...)`; one folder for all states"),
    "deepspeed_config.gradient_accumulation_steps": loop("accumulate", positive, "this number of backwards per step in the loop"),
    "deepspeed_config.gradient_clipping": loop("clip", number, "`torch.nn.utils.clip_grad_norm_` in the loop"),
    "deepspeed_config.deepspeed_config_file": fact("file", text, "zeroshard reads that file too"),
    "deepspeed_config.zero3_init_flag": ignored("build the model under `torch.device(\"meta\")`"),
    "deepspeed_config.zero3_save_16bit_model": ignored("`zero.export(folder, dtype=...)`"),
    "deepspeed_config.deepspeed_moe_layer_cls_names": ignored("a unit is gathered whole, whichever of its experts a batch uses"),
    **{
        f"deepspeed_config.{name}": ignored(LAUNCHER)
        for name in ("deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter")
    },
}  # fmt: skip
