"""A policy that samples one completion per prompt and is trained on it, in one process, again and again.

    python one_sample.py FOLDER RANK WORLD_SIZE

A prompt's first token is worth 0 or 2, whatever is sampled; a sampled token from the first half of the
vocabulary is worth its share of 1. So most of a reward's variance is the prompt's, which only a critic can
tell from what was sampled.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integration.trainer.program import VOCAB, join_groups, make_config
from tests.tiny_models import reference_model
from yatt.records import message as m

NUM_PROMPTS, LENGTH, WORTH = 32, 3, 2.0


def sampled(model, iteration: int):
    """Facts and rollouts of one iteration: every prompt once."""
    generator = torch.Generator().manual_seed(iteration)
    prompts = torch.randint(2, VOCAB, (NUM_PROMPTS, 2), generator=generator)
    prompts[:, 0] = torch.arange(NUM_PROMPTS) % 2
    ids, logprobs = prompts, []
    for _ in range(LENGTH):
        with torch.no_grad():
            logs = model(ids).logits[:, -1].log_softmax(-1)
        drawn = torch.multinomial(logs.exp(), 1, generator=generator)
        logprobs.append(logs.gather(1, drawn))
        ids = torch.cat([ids, drawn], 1)
    said = ids[:, 2:]
    shares = (said < VOCAB // 2).double().mean(1)
    rewards = (prompts[:, 0] * WORTH + shares).tolist()
    facts = tuple(m.SampleFact(n, n, reward, 2, LENGTH) for n, reward in enumerate(rewards))
    rows = zip(prompts.tolist(), said.tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
    rollouts = tuple(
        m.Rollout(sample_id=number, turns=(
            m.Turn(m.pack_ids(prompt)),
            m.Turn(m.pack_ids(tokens), is_sampled=True, logprobs=m.pack_floats(logs), finish_reason="stop"),
        ))
        for number, (prompt, tokens, logs) in enumerate(rows)
    )  # fmt: skip
    return facts, rollouts, float(shares.mean())


def learn(job: dict, folder: Path) -> dict:
    """Trains for some iterations; gives each one's metrics and mean share."""
    from yatt.checkpoint.store.store import FolderStore
    from yatt.trainer.device import prepare_process
    from yatt.trainer.worker import TrainerRank
    from yatt.weights.convert import export_weights, pick_tensors

    config = make_config(
        job["model"], {"train_batch_size": NUM_PROMPTS, "mini_batch_size": NUM_PROMPTS // 2},
        job["algorithm"], critic=job["critic"], lr=3e-3, lr_warmup_steps=0,
    )  # fmt: skip
    config = replace(config, rollout=replace(config.rollout, n=1, temperature=1.0))
    device = prepare_process(config, 0)
    join_groups(config, keeps_groups=False)
    worker = TrainerRank(config, device, FolderStore(folder / "unused"), tick=lambda: None, say=print)
    (place := folder / job["name"]).mkdir()
    worker.handle(m.Build(stem=str(place / "host-00000"), attempt=1))
    model, policy, written = reference_model(job["model"]).float(), worker._policy, []
    half = NUM_PROMPTS // 2
    plan = tuple(m.MiniBatchPlan(((tuple(range(at, at + half)),),)) for at in (0, half))
    for iteration in range(1, job["iterations"] + 1):
        tensors = {
            name: tensor
            for row, full in export_weights(policy.models, policy.rows, policy.groups)
            for name, tensor in zip(row.hf_names, pick_tensors(row, full), strict=True)
        }
        model.load_state_dict(tensors)
        facts, rollouts, share = sampled(model, iteration)
        order = m.Train(iteration=iteration, facts=facts, plan=plan, rollouts=rollouts)
        written.append(worker.handle(order).metrics | {"share": share})
    return {"metrics": written}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    for job in json.loads((folder / "jobs.json").read_text()):
        notes = learn(job, folder)
        (folder / job["name"] / "rank-0.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
