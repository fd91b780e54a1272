"""LoRA over a base of pretrained weights, a loop of your own: no rank holds the whole base at stage 3.

torchrun --nproc-per-node 2 examples/peft_lora.py [stage]
"""

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, logging

import zeroshard

logging.disable_progress_bar()
dist.init_process_group("gloo" if not torch.cuda.is_available() else "cpu:gloo,cuda:nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
if rank == 0:
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained("base")  # stands for a folder that you have
dist.barrier()

torch.manual_seed(1)
with torch.device("meta"):
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules="all-linear"))
optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
zero = zeroshard.load(model, "base", optimizer, stage=int(sys.argv[1]) if len(sys.argv) > 1 else 3, device=device)
for step in range(10):
    rows = (torch.arange(32) + torch.arange(4 * rank, 4 * rank + 4)[:, None] + step).to(device)
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(f"loss {loss.item():.6f}")
zero.export("adapter")  # for PeftModel.from_pretrained(base, "adapter")
dist.destroy_process_group()
