"""transformers 37766: a model that takes no num_items_in_batch is averaged by micro-batch, not by token."""

import shared
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

import zeroshard


class Model(shared.Tokens):
    def forward(self, input_ids, labels):  # without num_items_in_batch, or **options that may have it
        logits = super().forward(input_ids)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Logged(Trainer):
    def get_train_dataloader(self):
        return [shared.tokens(step, index) for step, count in enumerate(shared.MICRO) for index in range(count)]

    def training_step(self, *inputs, **more):
        loss = super().training_step(*inputs, **more)
        self.run_log.backward(loss)
        return loss


def theirs(folder, rank):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = TrainingArguments(
        str(folder.parent / "trainer"), gradient_accumulation_steps=4, max_steps=2, max_grad_norm=0.0, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Logged(model, settings, optimizers=(optimizer, schedule))
    with zeroshard.RunLog(folder, model, optimizer) as trainer.run_log:
        trainer.train()


if __name__ == "__main__":
    job = {"build": shared.Tokens, "loss_of": shared.token_loss, "share": shared.tokens_share}
    shared.run(theirs, "transformers==5.23.0", ranks=1, **job)
