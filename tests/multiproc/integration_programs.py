"""Train under frameworks with rankcall's callbacks, on ranks of the real packages."""

from __future__ import annotations

import hashlib
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankcall
from rankcall.capture import session
from rankcall.integrations import reporter
from rankcall.ring.reader import read_ring

Result = dict[str, Any]


def declared() -> str:
    """Return the phase that this rank's ring declares now, or an empty string."""
    recording = session.current()
    assert recording is not None
    assert recording.path is not None
    header = read_ring(recording.path).header
    return header.expect_what if header.expect_until_ns > time.monotonic_ns() else ""


def begin(folder: str) -> None:
    """Record, and give the last look all the time that a busy machine needs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    reporter.LAST_LOOK_S = 120.0
    rankcall.enable(Path(folder) / "run")


def digest(model: nn.Module) -> str:
    """Return a hash of all bits of a model."""
    raw = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(raw).hexdigest()


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return the same batches everywhere."""
    made = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(24, 6, generator=made)), batch_size=2)


def with_lightning(rank: int, world_size: int, folder: str) -> Result:
    """Fit with the callback, without it, and with a step that fails on both ranks."""
    begin(folder)
    seen: Result = {"phases": []}
    with_callback = _fit(rank, folder, seen, callback=True)
    plain = _fit(rank, folder, {"phases": []}, callback=False)
    failing: Result = {"phases": [], "fails": True}
    try:
        _fit(rank, folder, failing, callback=True)
    except KeyError as error:
        failing["error"] = str(error)
    rankcall.disable()
    return {**seen, "same": with_callback == plain, "failing": failing}


def _fit(rank: int, folder: str, seen: Result, *, callback: bool) -> str:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers.logger import Logger

    from rankcall.integrations.lightning import RankcallCallback

    class Log(Logger):
        name, version = "log", 0

        def __init__(self) -> None:
            super().__init__()
            self.figures: list[dict[str, float]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.figures.append({**metrics, "step": step or 0})

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Linear(6, 2)

        def training_step(self, batch: Any, step: int) -> torch.Tensor:
            if seen.get("fails") and step == 2:
                raise KeyError("no such sample")
            seen["phases"].append(("train", declared()))
            return self.model(batch[0]).square().mean()

        def validation_step(self, batch: Any, step: int) -> None:
            seen["phases"].append(("validate", declared()))

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            seen["phases"].append(("save", declared()))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    log, module = Log(), Module()
    callbacks: list[Any] = [RankcallCallback(every_s=0.0)] if callback else []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        callbacks=callbacks,
        logger=log,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=Path(folder) / str(rank),
    )
    try:
        trainer.fit(module, batches(), batches())
    finally:
        seen["figures"] = [entry for entry in log.figures if "rankcall/waiting_share" in entry]
        seen["restored"] = "save_checkpoint" not in vars(trainer)
    return digest(module)


def with_accelerate(rank: int, world_size: int, folder: str) -> Result:
    """Train with the tracker beside another one, and without it."""
    begin(folder)
    seen: Result = {"phases": []}
    tracked = _accelerated(folder, seen, tracker=True)
    plain = _accelerated(folder, {"phases": []}, tracker=False)
    dist.destroy_process_group()
    rankcall.disable()
    return {**seen, "same": tracked == plain}


def _accelerated(folder: str, seen: Result, *, tracker: bool) -> str:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    from rankcall.integrations.accelerate import follow

    class Log(GeneralTracker):
        name, requires_logging_directory = "log", False

        def __init__(self) -> None:
            super().__init__()
            self.figures: list[dict[str, float]] = []

        @property
        def tracker(self) -> list[dict[str, float]]:
            return self.figures

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
            self.figures.append({**values, "step": step})

    log = Log()
    accelerator = Accelerator(cpu=True, log_with=log)
    accelerator.init_trackers("job")
    before = dict(vars(accelerator))
    if tracker:
        expect = follow(accelerator, every_s=0.0)
    torch.manual_seed(0)
    plain = nn.Linear(6, 2)
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.01), batches()
    )

    def save(*_: Any) -> None:
        seen["phases"].append(("save", declared()))

    accelerator.register_save_state_pre_hook(save)
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(model(batch[0]).square().mean())
        optimizer.step()
        accelerator.log({"loss": 1.0}, step=step)
        seen["phases"].append(("train", declared()))
    accelerator.save_state(str(Path(folder) / "checkpoint"))
    if tracker:
        with expect(60, "evaluation"):
            seen["phases"].append(("validate", declared()))
    # end_training would destroy the group, in which the second training goes on.
    for open_tracker in accelerator.trackers:
        open_tracker.finish()
    seen["figures"] = [entry for entry in log.figures if "rankcall/waiting_share" in entry]
    seen["restored"] = all(name in before for name in vars(accelerator) if name.startswith("sa"))
    return digest(plain)


def with_transformers(rank: int, world_size: int, folder: str) -> Result:
    """Train with the callback and without it."""
    begin(folder)
    seen: Result = {"phases": []}
    called = _transformed(f"{folder}/called", seen, callback=True)
    plain = _transformed(f"{folder}/plain", {"phases": []}, callback=False)
    dist.destroy_process_group()
    rankcall.disable()
    return {**seen, "same": called == plain}


def _transformed(folder: str, seen: Result, *, callback: bool) -> str:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from rankcall.integrations.transformers import RankcallCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            seen["phases"].append(("train" if self.training else "validate", declared()))
            return {"loss": (self.layer(x) - labels).square().mean(), "logits": x}

    class SavingTrainer(Trainer):  # type: ignore[misc, unused-ignore]
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            seen["phases"].append(("save", declared()))
            super()._save_checkpoint(*args, **kwargs)

    class Late(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Comes after rankcall's callback, and sees what that has added."""

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            if "rankcall/waiting_share" in logs:
                seen.setdefault("logged", []).append(logs)

    made = torch.Generator().manual_seed(1)
    rows = torch.randn(24, 6, generator=made)
    data = [{"x": row, "labels": row[:2]} for row in rows]
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    model = Model()
    callbacks = [RankcallCallback(every_s=0.0), Late()] if callback else []
    trainer = SavingTrainer(
        model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks
    )
    trainer.train()
    seen["figures"] = [
        entry for entry in trainer.state.log_history if "rankcall/waiting_share" in entry
    ]
    seen["restored"] = declared() == ""
    return digest(model)
