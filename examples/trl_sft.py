"""TRL's SFTTrainer with LoRA, sharded: a mixin in front of the trainer. Nothing is downloaded.

torchrun --nproc-per-node 2 examples/trl_sft.py [stage]
"""

import sys

import datasets
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from zeroshard.integrations.transformers import ZeroTrainerMixin


class Trainer(ZeroTrainerMixin, SFTTrainer):
    pass


set_seed(0)
words = Tokenizer(models.WordLevel({f"{number}": number for number in range(64)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")
texts = [" ".join(str(2 + (start + step) % 62) for step in range(20)) for start in range(64)]
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
arguments = SFTConfig(
    "out", use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(), max_length=64, packing=True,
    max_steps=10, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=10, report_to="none",
)  # fmt: skip
trainer = Trainer(
    LlamaForCausalLM(config), arguments, train_dataset=datasets.Dataset.from_dict({"text": texts}),
    processing_class=tokenizer, peft_config=LoraConfig(r=8, target_modules="all-linear"),
    stage=int(sys.argv[1]) if len(sys.argv) > 1 else 3,
)  # fmt: skip
trainer.train()
trainer.save_model("adapter")  # for PeftModel.from_pretrained
