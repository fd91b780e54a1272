"""Lightning 19987: the last step of an epoch has fewer micro-batches, and its gradients are too small."""

import lightning
import shared
import torch

import zeroshard

MICRO = [4, 2]


class Module(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.model = shared.build()
        self.run_log = zeroshard.RunLog(folder, self.model)

    def training_step(self, at, _):
        self.loss = shared.mse(self.model, *divmod(int(at), 4))
        return self.loss

    def on_after_backward(self):
        self.run_log.backward(self.loss)

    def on_before_optimizer_step(self, optimizer):
        self.run_log.gradients()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def theirs(folder, rank):
    module, quiet = Module(folder), {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=4, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(range(sum(MICRO)), batch_size=None))
    module.run_log.close()


if __name__ == "__main__":
    shared.run(theirs, "lightning==2.6.6", ranks=1, micro=MICRO)
