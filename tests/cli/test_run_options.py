"""`dflash-trt run` takes every option that a request may have."""

from __future__ import annotations

import argparse
from dataclasses import fields

from dflash_trt.cli.run import _options, add_parser
from dflash_trt.runtime.options import GenerationOptions

WANTED = GenerationOptions(
    max_tokens=7, draft=False, width=3, ignore_eos=True, min_tokens=2, stop=("a", "b"),
    stop_token_ids=(4, 5), temperature=0.5, top_k=6, top_p=0.75, min_p=0.25,
    repetition_penalty=1.5, presence_penalty=0.125, frequency_penalty=-0.5,
    logit_bias={8: -1.5, 9: 2.0}, seed=10, logprobs=1, deadline=11.5, adaptive=True,
)  # fmt: skip
COMMAND = (
    "run engine question --max-tokens 7 --no-draft --block 3 --ignore-eos --min-tokens 2 --stop a "
    "--stop b --stop-token-id 4 --stop-token-id 5 --temperature 0.5 --top-k 6 --top-p 0.75 --min-p "
    "0.25 --repetition-penalty 1.5 --presence-penalty 0.125 --frequency-penalty -0.5 --logit-bias "
    "8=-1.5 --logit-bias 9=2 --seed 10 --logprobs 1 --deadline 11.5 --adaptive"
)


def test_each_option_of_the_command_is_the_requests() -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    assert _options(parser.parse_args(COMMAND.split())) == WANTED
    usual = GenerationOptions()
    same = [f.name for f in fields(usual) if getattr(WANTED, f.name) == getattr(usual, f.name)]
    assert not same, "options that this test does not set"
    assert _options(parser.parse_args(["run", "engine", "question"])) == usual
