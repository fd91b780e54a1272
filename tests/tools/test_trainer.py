"""Hugging Face's Trainer: `ZeroTrainer` trains, evaluates and saves as the plain Trainer with DDP does, to the bit.

Tiny models from their configurations, token ids for data. `max_grad_norm=0` wherever bits are compared with DDP's: clipping
takes exact norms here.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ranks
from trainers import LIMIT, fresh, run_example, same_at_all_stages
from zeroshard import Layout
from zeroshard.errors import CheckpointError, StateError, UserError
from zeroshard.integrations.jobs import parts_of
from zeroshard.planner import shapes

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.trainers

STAGES = (0, 1, 2, 3)


def llama(**options):
    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **options))


def examples(number, length=8):
    generator = torch.Generator().manual_seed(number)
    rows = torch.randint(0, 64, (number, length), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(stage, folder, model=None, layout=None, weights=None, **options):
    """The plain one where there is no stage."""
    from zeroshard.integrations.transformers import ZeroTrainer

    fresh()
    arguments = {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "per_device_train_batch_size": 2,
        "max_steps": 6, "learning_rate": 0.01, "max_grad_norm": 0.0, "save_strategy": "no", "seed": 7,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(output_dir=str(folder), **arguments | options)
    data = {"train_dataset": examples(24), "eval_dataset": examples(10)}
    model = llama() if model is None else model
    if stage is None:
        return transformers.Trainer(model, arguments, **data)
    return ZeroTrainer(model, arguments, **data, stage=stage, layout=layout, weights=weights)


def history(made):
    """What the trainer logged of the training, without what depends on time."""
    kept = ("loss", "eval_loss", "learning_rate", "step")
    return [{key: log[key] for key in kept if key in log} for log in made.state.log_history]


def weights(made):
    state = made.accelerator.get_state_dict(made.model)
    return {name: tensor.tolist() for name, tensor in state.items()} if ranks.rank() == 0 else None


def runs(stages, folder, options):
    found = []
    for stage in stages:
        made = trainer(stage, folder / str(stage), **options)
        made.train()
        found.append((history(made), made.evaluate()["eval_loss"], weights(made)))
    return found


OPTIONS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4},
    "bf16, recomputed": {"bf16": True, "activation_checkpointing": True, "optim": "adamw_torch_fused", "max_steps": 4},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_bits_are_those_of_the_plain_trainer(name, tmp_path):
    """Logged losses and rates, the evaluation during and after training, and the weights: equal at stages 0-3."""
    for plain, *sharded in ranks.run(2, runs, (None, *STAGES), tmp_path, OPTIONS[name], group="env", timeout=LIMIT):
        assert len(plain[0]) >= 4
        for found in sharded:
            assert found == plain


def slow_save(*args, save=torch.save, **kwargs):
    time.sleep(0.1 * ranks.rank())
    save(*args, **kwargs)


def best(stages, folder):
    found = []
    for stage in stages:
        options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
        options |= {"load_best_model_at_end": True, "learning_rate": 0.5, "max_steps": 6, "save_total_limit": 2}
        options |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the worst, which is not the last
        made = trainer(stage, folder / str(stage), **options)
        made.train()
        which = made.state.best_model_checkpoint
        first = weights(made)
        made.save_model(str(folder / f"{stage} again"))
        found.append((which.rpartition("/")[2], first, history(made), made.evaluate()["eval_loss"]))
        made.args.max_steps = 8
        if stage is None:  # the plain Trainer's rank 0 may remove the folder that rank 1 still writes to
            made.args.output_dir = str(folder / "plain again")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "save", slow_save)
            made.train()  # once more: the model is sharded already
        found[-1] += (weights(made),)
    return found


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    """At stages 0 and 3 as with DDP, also in the middle of training; and `train` may be called again."""
    both = ranks.run(2, best, (None, 0, 3), tmp_path, group="env", timeout=LIMIT)
    for plain, *sharded in both:
        assert plain[0] in ("checkpoint-2", "checkpoint-4")
        for found in sharded:
            assert found == plain
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "3 again").state_dict()
    assert {name: tensor.tolist() for name, tensor in read.items()} == both[0][0][1]


def lora(stages, folder):
    import peft

    found = []
    for stage in stages:
        fresh()
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
        made = trainer(stage, folder / f"run {stage}", peft.get_peft_model(llama(), config), eval_strategy="epoch")
        made.train()
        made.save_model(str(folder / str(stage)))
        for _ in range(2 if stage is not None else 0):  # the second time it replaces its own
            made.zero.export(folder / f"exported {stage}")
        found.append((history(made), weights(made)))
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_of_peft(tmp_path):
    """LoRA at stages 0-3 as with DDP; what is saved, and what `zero.export` writes, is an adapter alone, which
    `PeftModel.from_pretrained` reads."""
    peft = pytest.importorskip("peft")
    plain, *sharded = ranks.run(2, lora, (None, *STAGES), tmp_path, group="env", timeout=LIMIT)[0]
    for stage, found in zip(STAGES, sharded, strict=True):
        assert found == plain
        assert not (tmp_path / str(stage) / "model.safetensors").exists()
        for folder in (tmp_path / str(stage), tmp_path / f"exported {stage}"):
            read = peft.PeftModel.from_pretrained(llama(), folder).state_dict()
            assert {name: tensor.tolist() for name, tensor in read.items()} == plain[1]
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        assert len(load_file(folder / "adapter_model.safetensors")) == 8
        told, own = (json.loads((each / "adapter_config.json").read_text()) for each in (folder, tmp_path / str(stage)))
        assert told == own
    assert any(any(map(any, value)) for name, value in plain[1].items() if "lora_B" in name)  # begins as zeros


def tuner(stage, folder, adapters, **options):
    """TRL's trainer, packing rows of several lengths, with adapters or without."""
    import datasets
    import peft
    import tokenizers
    import trl

    from zeroshard.integrations.transformers import ZeroTrainerMixin

    class Sharded(ZeroTrainerMixin, trl.SFTTrainer):
        pass

    words = tokenizers.models.WordLevel({str(number): number for number in range(64)}, unk_token="62")
    tokens = {"pad_token": "62", "eos_token": "63", "unk_token": "62"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **tokens)
    rows = [{"input_ids": row["input_ids"][: 3 + at % 6]} for at, row in enumerate(examples(48))]
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM") if adapters else None
    fresh()
    arguments = {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "packing": True, "max_length": 16, "logging_steps": 1,
        "per_device_train_batch_size": 1, "max_grad_norm": 0.0, "bf16": False, "learning_rate": 0.01,
    }  # fmt: skip
    kind, settings = (trl.SFTTrainer, {}) if stage is None else (Sharded, {"stage": stage})
    data = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer}
    return kind(llama(), trl.SFTConfig(str(folder), **arguments | options), **data, peft_config=config, **settings)


def tuned(stages, folder):
    found = []
    for stage in stages:
        for adapters in (False, True):
            made = tuner(stage, folder / f"{stage} {adapters}", adapters, max_steps=3)
            made.train()
            found.append((history(made), weights(made)))
    return found


def test_trls_trainer_with_packing(tmp_path):
    """SFTTrainer by the mixin, whole and with adapters, has the bits of its own DDP run."""
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    for found in ranks.run(2, tuned, (None, *STAGES), tmp_path, group="env", timeout=LIMIT):
        assert len(found[0][0]) == 4 and found[0] != found[1]
        assert found[2::2] == found[:1] * 4
        assert found[3::2] == found[1:2] * 4


def goes_on(folder, kind, stage, saves, resumes, accumulation=1):
    options = {"max_steps": 6, "gradient_accumulation_steps": accumulation}
    options |= {"save_strategy": "steps", "save_steps": 3} if saves else {"save_strategy": "no"}
    made = trainer(stage, folder, **options) if kind == "plain" else tuner(stage, folder, kind == "adapters", **options)
    made.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resumes else None)
    return history(made), weights(made)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["plain", "packed", "adapters"])
def test_a_checkpoint_is_gone_on_from(kind, tmp_path):
    """By the Trainer, and by TRL's. Saved on two ranks at stage 3: on two ranks at stage 1, and on one that accumulates two micro-batches, the second
    half has the bits of the run that never stopped. Its weights are read by `from_pretrained`."""
    if kind != "plain":
        pytest.importorskip("trl")
        pytest.importorskip("peft")
    whole = ranks.run(2, goes_on, tmp_path, kind, 3, True, False, group="env", timeout=LIMIT)[0]
    saved = tmp_path / "checkpoint-3"
    assert {path.name for path in saved.iterdir()} >= {
        "zeroshard",
        f"{'adapter_' * (kind == 'adapters')}model.safetensors",
        "scheduler.pt",
    }
    assert not (saved / "optimizer.pt").exists()
    again = ranks.run(2, goes_on, tmp_path, kind, 1, False, True, group="env", timeout=LIMIT)[0]
    alone = ranks.run(1, goes_on, tmp_path, kind, 0, False, True, 2, group="env", timeout=LIMIT)[0]
    assert whole == again == alone
    if kind == "adapters":  # what reads these is tested above
        return
    last = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-6").state_dict()
    assert {name: tensor.tolist() for name, tensor in last.items()} == whole[1]


def other_things(folder):
    """What is asked of a model beside training, at stage 3 on two ranks."""
    made = trainer(3, folder, layout=Layout(units=["LlamaDecoderLayer"]))
    made.train()
    assert [unit.name for unit in made.zero._engine.units] == ["", "model.layers.0", "model.layers.1"]
    prompt = torch.tensor([[1, 2, 3]])
    written = made.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    with made.zero.gathered():
        inside = made.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    return written.tolist(), inside.tolist(), made.predict(examples(6)).predictions.shape


def test_generation_and_prediction(tmp_path):
    first, second = ranks.run(2, other_things, tmp_path, group="env", timeout=LIMIT)
    assert first == second
    assert first[0] == first[1] and len(first[0][0]) == 7
    assert first[2] == (6, 8, 64)


def test_a_model_on_meta_has_its_own_first_values():
    """`_init_weights` of Hugging Face's models, whose rotary buffers no file has either."""
    import zeroshard

    plain = llama()
    with torch.device("meta"):
        model = llama(initializer_range=0.5)
    zero = zeroshard.shard(model, None)
    with zero.gathered():
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, plain.get_buffer(name)), name
        assert bool((model.model.norm.weight == 1).all())
        assert 0.4 < model.model.layers[0].mlp.up_proj.weight.std() < 0.6  # torch's own would be 0.1


def pretrained(stages, folder):
    """Of a model that the plain Trainer is given with its weights, and `ZeroTrainer` on meta beside their folder."""
    found = []
    for stage in stages:
        with torch.device("cpu" if stage is None else "meta"):
            model = llama(tie_word_embeddings=True)
        if stage is None:
            model = type(model).from_pretrained(folder)
        made = trainer(stage, folder / str(stage), model, weights=folder, max_steps=3)
        made.train()
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        found.append((history(made), weights(made)))
    return found


def test_a_folder_of_pretrained_weights_fills_a_model_on_meta(tmp_path):
    """Each rank reads its own parts (`test_weights.py`); tied weights stay tied; all else is as from `from_pretrained`."""
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    plain, *sharded = ranks.run(2, pretrained, (None, *STAGES), tmp_path, group="env", timeout=LIMIT)[0]
    for found in sharded:
        assert found == plain


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_over_a_folder_of_pretrained_weights(tmp_path):
    """The base comes from the folder, under the base's own names, and an adapter on meta from PEFT's first values."""
    import zeroshard

    peft = pytest.importorskip("peft")
    llama().save_pretrained(tmp_path)
    names = ["q_proj", "embed_tokens"]

    def adapted(**options):
        config = peft.LoraConfig(target_modules=names, modules_to_save=["norm"], task_type="CAUSAL_LM", **options)
        with torch.device("meta"):
            return peft.get_peft_model(llama(), config)

    model, plain = adapted(), peft.get_peft_model(llama(), adapted().peft_config["default"])
    zero = zeroshard.load(model, tmp_path, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    with zero.gathered():
        for (name, found), (other, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert name == other
            if "lora_A" in name or "embedding_B" in name:
                assert 0.8 < found.std() / want.std() < 1.25  # drawn anew
            else:
                assert torch.equal(found, want), name
    with pytest.raises(CheckpointError, match=r"(?s)lora_.*gaussian.*not on meta"):
        zeroshard.load(adapted(use_dora=True), tmp_path)
    with pytest.raises(UserError, match=r"(?s)lora_.*init=function"):
        zeroshard.shard(adapted(), None)
    zero.save(tmp_path / "saved")
    again = zeroshard.load(adapted(use_dora=False), tmp_path / "saved")  # the adapter comes from there
    with zero.gathered(), again.gathered():
        for found, want in zip(again.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(found, want)
    (tmp_path / "model.safetensors").unlink()
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, hidden_size=32, num_hidden_layers=1))
    other.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)layers.1.self_attn.q_proj.base_layer.weight' is not in the folder"):
        zeroshard.load(adapted(), tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("stage", [1, 3])
def test_first_values_of_several_adapters_and_copies(tmp_path, stage):
    """Of an embedding's adapters each has its own; a head that is a unit by itself; a copy of a tied head is the head."""
    import zeroshard

    peft = pytest.importorskip("peft")

    def wide():  # so wide that each matrix of the head's adapter is a unit
        torch.manual_seed(1)
        sizes = {"vocab_size": 16_384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
        )

    wide().save_pretrained(tmp_path)
    with torch.device("meta"):
        model = peft.get_peft_model(wide(), peft.LoraConfig(target_modules=["embed_tokens", "q_proj"], r=8))
        model.add_adapter("other", peft.LoraConfig(target_modules=["embed_tokens"], r=4))
    with zeroshard.load(model, tmp_path, stage=stage).gathered():
        inner = model.base_model.model.model.embed_tokens
        for adapter in ("default", "other"):
            assert not inner.lora_embedding_A[adapter].any()
            assert 0.9 < inner.lora_embedding_B[adapter].std() < 1.1
    with torch.device("meta"):
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = peft.get_peft_model(wide(), config)
    with zeroshard.load(model, tmp_path, stage=stage).gathered():
        assert torch.equal(model.base_model.model.lm_head.modules_to_save["default"].weight, wide().lm_head.weight)
    with torch.device("meta"):
        model = peft.get_peft_model(wide(), peft.LoraConfig(target_modules=["lm_head"], r=8))
    with zeroshard.load(model, tmp_path, stage=stage).gathered():
        assert not model.base_model.model.lm_head.lora_B["default"].weight.any()
        assert model.base_model.model.lm_head.lora_A["default"].weight.std() > 0.05


def test_a_model_on_meta_is_filled_by_train_alone(tmp_path):
    """Before it nothing is computed or saved, and a checkpoint of whole weights is refused, not passed over."""
    llama().save_pretrained(tmp_path / "base")
    whole = trainer(None, tmp_path / "whole", save_strategy="steps", save_steps=2, save_only_model=True, max_steps=2)
    whole.train()
    with torch.device("meta"):
        model = llama()
    made = trainer(3, tmp_path / "run", model, weights=tmp_path / "base")
    for call in (made.evaluate, lambda: made.predict(examples(2)), made.save_model):
        with pytest.raises(StateError, match=r"before train\(\)"):
            call()
    with pytest.raises(CheckpointError, match=r"(?s)on meta cannot take whole weights.*weights="):
        made.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))


def trainer_class():
    from zeroshard.integrations.transformers import ZeroTrainer

    return ZeroTrainer


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"(?s)ZeroTrainer takes no such argument.*stge=1.*did you mean stage=1\?"):
        trainer_class()(torch.nn.Linear(2, 2), stge=1)
    for name, value in (("auto_find_batch_size", True), ("ddp_bucket_cap_mb", 10), ("ddp_broadcast_buffers", False)):
        with pytest.raises(UserError, match=f"(?s){name}={value}.*instead"):
            trainer(3, tmp_path, **{name: value})
    made = trainer(None, tmp_path, save_strategy="steps", save_steps=2)
    made.train()
    with pytest.raises(CheckpointError, match="(?s)does not shard.*checkpoint-2"):
        trainer(3, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_example_is_short_and_runs(tmp_path):
    run_example("hf_trainer", tmp_path)


@pytest.mark.parametrize("name", ["peft_lora", "trl_sft"])
def test_the_examples_with_adapters_print_the_same_at_stages_1_to_3(name, tmp_path):
    pytest.importorskip("peft" if name == "peft_lora" else "trl")
    same_at_all_stages(name, tmp_path)


def tracked(folder):
    """What the real wandb keeps of a run, offline, beside what `zero.metrics` says of it."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}  # before it is imported
    import wandb

    made = trainer(3, folder, report_to="wandb", run_name="zeroshard", max_steps=2)
    made.train()
    if ranks.rank():
        return wandb.run
    numbers = made.zero.metrics(tokens=64)
    wandb.log(numbers)
    kept = dict(wandb.run.summary)
    folder = wandb.run.dir
    wandb.finish()
    return numbers, kept, history(made), folder


def test_a_run_with_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    (numbers, kept, logged, folder), other = ranks.run(2, tracked, tmp_path, group="env", timeout=LIMIT)
    assert other is None
    assert numbers
    assert all(kept[name] == value for name, value in numbers.items())
    assert kept["train/loss"] == [log["loss"] for log in logged if "loss" in log][-1]
    assert any(Path(folder).parent.glob("*.wandb"))


JOB = """
import sys
sys.path[:0] = {tests!r}
from test_trainer import trainer

def job():
    return trainer(None, {folder!r}, weight_decay=0.1)
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_verify_takes_a_trainer(precision, tmp_path):
    """Its own model, groups, loss and collation, at every stage: equal bits."""
    (tmp_path / "train.py").write_text(
        JOB.format(tests=[str(each) for each in Path(__file__).parents[:2]], folder=str(tmp_path))
    )
    words = ["verify", f"{tmp_path}/train.py:job", "--ranks", 2, "--stage", "0,3", "--bucket-mib", 24, "--steps", 2]
    done = ranks.command(*words, "--precision", precision, "--json", timeout=LIMIT)
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and told["equal"] and len(told["results"]) == 4
    assert not any("no parameter changed" in note for note in told["notes"])


def test_the_parts_of_a_trainer_are_its_own(tmp_path):
    made = trainer(None, tmp_path, weight_decay=0.1)
    parts = parts_of(made)
    (decayed, plain), own = parts["optimizer"](parts["model"].parameters()).param_groups, made.create_optimizer()
    assert [group["weight_decay"] for group in (decayed, plain)] == [0.1, 0.0]
    assert [len(group["params"]) for group in own.param_groups] == [len(decayed["params"]), len(plain["params"])]
    masters = [param.detach().clone().requires_grad_() for param in parts["model"].parameters()]
    again = parts["optimizer"](masters)
    assert {id(param) for group in again.param_groups for param in group["params"]} == set(map(id, masters))
    assert again.defaults["lr"] == 0.01 and type(again) is type(own)
    torch.manual_seed(5)
    batch = parts["batch"](0, 0)
    assert batch["input_ids"].shape == (2, 8)
    assert torch.equal(parts["loss"](parts["model"], batch), made.compute_loss(made.model, batch))
    made.train_dataset = None
    with pytest.raises(UserError, match="nothing to train on"):
        parts_of(made)
    assert parts_of({"model": 1}) is None and parts_of(None) is None


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS = ("Qwen3ForCausalLM", "MixtralForCausalLM", "BertForMaskedLM", "ViTModel", "LlamaForSequenceClassification")


@pytest.mark.parametrize("name", OTHERS)
def test_plan_reads_the_config_of_any_model(name, tmp_path):
    """Names, shapes and ties of the parameters are those of the model that the config builds."""
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES))
    model.config.architectures = [name]
    model.config.save_pretrained(tmp_path)
    found = shapes.read(tmp_path)
    every = dict(model.named_parameters(remove_duplicate=False))
    assert dict(found.parameters) == {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert found.ties.keys() == every.keys() - found.parameters.keys()
    assert all(every[name] is every[first] for name, first in found.ties.items())


def test_a_config_that_names_too_much_or_nothing_is_refused(tmp_path):
    """No class outside the library, no code, and no million of layers."""
    for told, said in (
        ({"model_type": "qwen3", "num_hidden_layers": 10**6}, "num_hidden_layers: at most 4096"),
        ({"model_type": "qwen3", "hidden_size": 1 << 40}, "hidden_size: at most"),
        ({"model_type": "no-such-model"}, "transformers builds no model from this config"),
        (
            {"model_type": "mine", "auto_map": {"AutoModel": "evil.Model"}},
            "transformers builds no model from this config",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(told))
        with pytest.raises(UserError, match=said):
            shapes.read(tmp_path)
