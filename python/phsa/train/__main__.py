"""Training with sparse attention.

    python -m phsa.train config.toml
    torchrun --nproc-per-node 8 -m phsa.train config.toml

A run that was stopped, however, goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import transformers

from ..ops import backends, missing_kernels
from .checkpoints import CheckpointError
from .config import Config, ConfigError, read
from .loop import Run, Stopped, TrainingError


def _device(config: Config, local_rank: int) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees none here; allowed: cpu, auto")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; allowed: auto, cpu, cuda")
    if name == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _start_processes(device: torch.device, needed: bool) -> tuple[int, int]:
    """Joins the processes that torchrun started. One alone needs a group only where weights are sharded."""
    if "RANK" in os.environ or needed:
        options = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m phsa.train", description="training with sparse attention")
    parser.add_argument("config", help="a TOML file (docs/training.md)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value for one key")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args()
    if args.quiet or not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        config = read(args.config, args.set)
        device = _device(config, int(os.environ.get("LOCAL_RANK", "0")))
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        full = config.lora is None and config.model.dtype != "float32"
        rank, world = _start_processes(device, full)
        if config.attention.method != "dense" and rank == 0 and not args.quiet and device.type not in backends():
            reason = missing_kernels() or f"libphsa was built without {device.type.upper()}"
            print(f"phsa: no kernels, plain PyTorch is many times slower: {reason}", file=sys.stderr)
        Run(config, rank=rank, world=world, device=device, quiet=args.quiet).run()
    except Stopped as stopped:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 128 + stopped.number
    except (ConfigError, ValueError) as error:
        print(f"phsa: {error}", file=sys.stderr)
        return 2
    except (OSError, CheckpointError, TrainingError, torch.OutOfMemoryError) as error:
        print(f"phsa: {error}", file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
