"""Hugging Face's Trainer with a sharded Llama, from its configuration: nothing is downloaded.

torchrun --nproc-per-node 2 examples/hf_trainer.py
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["zeroshard[hf]"]
# [tool.uv.sources]
# zeroshard = { path = "..", editable = true }
# ///

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from zeroshard.integrations.transformers import ZeroTrainer

set_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)  # fmt: skip
model = LlamaForCausalLM(config)  # or LlamaForCausalLM.from_pretrained("path/to/folder")
rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).repeat(64, 1) + torch.arange(64)[:, None]]
arguments = TrainingArguments(
    "out", use_cpu=not torch.cuda.is_available(), per_device_train_batch_size=4, gradient_accumulation_steps=2,
    activation_checkpointing=True, learning_rate=1e-2, max_steps=10, logging_steps=5, save_steps=5, eval_steps=5,
    eval_strategy="steps", load_best_model_at_end=True, report_to="none", disable_tqdm=True,
)  # fmt: skip
trainer = ZeroTrainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], stage=3)
trainer.train()  # trainer.train(resume_from_checkpoint=True) goes on, on any number of ranks
trainer.save_model("weights")
if trainer.is_world_process_zero():
    LlamaForCausalLM.from_pretrained("weights")
