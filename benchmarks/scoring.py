"""Scoring equals sampling: the log-probs that the update computes against those the sampler recorded, over 64
ragged sequences with M3PO.

    python benchmarks/scoring.py --model DIR --data FOLDER

On the CPU in float32; on a GPU with a bf16 sampler and float32 policy weights under bf16 autocast, as in
training. Beside it the difference that scoring plain ids gives, as the published M3PO scripts do.
"""

import argparse
import sys

from common import ROOT, write_results

sys.path.insert(0, str(ROOT))
import torch

from decoding.decoder import GroupDecoder
from decoding.rollout import Interaction, Sampling, rollout_uniforms
from learning.log_probs import Scorer
from learning.memory import micro_batches
from learning.models import load_model, load_tokenizer
from problems.prompts import Prompting
from problems.sources import load_problems
from rewards import ANSWER_FORMATS


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--length", type=int, default=128)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, G = torch.device("cuda" if cuda else "cpu"), 8
    tokenizer = load_tokenizer(args.model)
    sampler = load_model(args.model, tokenizer, torch.bfloat16 if cuda else torch.float32, device).eval()
    policy = load_model(args.model, tokenizer, torch.float32, device)
    xml = ANSWER_FORMATS["xml"]
    prompting = Prompting("xml", xml.system_prompt)
    problems, _ = prompting.encode(tokenizer, load_problems(args.data, "train", limit=8), 512)
    decoder = GroupDecoder(sampler, tokenizer, xml.think_end, Interaction(0.1, 0.1))
    uniforms = rollout_uniforms(0, 0, 0, len(problems) * G, args.length)
    out = decoder.rollout([p.ids for p in problems], Sampling(args.length, G, temperature=1.0), uniforms)
    cut = torch.randint(
        args.length // 4, args.length + 1, (len(out.ids), 1), generator=torch.Generator().manual_seed(0)
    ).to(device)
    # ragged whether or not the model ends its texts in time
    out.mask &= torch.arange(out.mask.shape[1], device=device) < cut
    scorer = Scorer(policy, decoder.tables, torch.bfloat16)

    def difference():
        scores = torch.zeros_like(out.logp)
        for rows in micro_batches(out, 16384):
            scores[rows] = scorer(out, rows)[0]
        apart = (scores - out.logp).abs()[out.mask]
        return float(apart.max()), float(apart.mean())

    case = f"scoring-{'bf16-gpu' if cuda else 'fp32-cpu'}"
    rows = [(case, "sequences", len(out.ids), "sequences"), (case, "tokens", int(out.mask.sum()), "tokens")]
    rows += [
        (case, f"{name}_difference", value, "nats")
        for name, value in zip(("largest", "mean"), difference(), strict=True)
    ]
    out.mix = None
    rows += [
        (case, f"{name}_difference_plain_ids", value, "nats")
        for name, value in zip(("largest", "mean"), difference(), strict=True)
    ]
    write_results(f"scoring_{'gpu' if cuda else 'cpu'}", rows)


if __name__ == "__main__":
    main()
