"""A Lightning fit with a sharded module: the strategy's name is all that is not Lightning's.

torchrun --nproc-per-node 2 examples/lightning_fit.py    # or without torchrun: Lightning starts the second process
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["zeroshard[lightning]"]
# [tool.uv.sources]
# zeroshard = { path = "..", editable = true }
# ///

import lightning
import torch
from torch import nn

import zeroshard.integrations.lightning  # noqa: F401  # it registers zeroshard_stage_0 to zeroshard_stage_3


class Module(lightning.LightningModule):
    def configure_model(self):
        with torch.device("meta"):  # memory for the weights only once they are sharded
            self.net = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1))

    def training_step(self, batch, number):
        loss = nn.functional.mse_loss(self.net(batch), batch.sum(1, keepdim=True))
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
loader = torch.utils.data.DataLoader(torch.randn(128, 16), batch_size=8, shuffle=True)
trainer = lightning.Trainer(
    strategy="zeroshard_stage_3", accelerator="auto", devices=2, max_epochs=3, accumulate_grad_batches=2, logger=False,
    gradient_clip_val=1.0, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Module(), loader)
trainer.save_checkpoint("state.ckpt")  # trainer.fit(Module(), loader, ckpt_path="state.ckpt") on any number of ranks
trainer.print(f"loss {trainer.callback_metrics['loss']:.4f}")
