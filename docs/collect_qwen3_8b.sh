#!/bin/sh
# Records Qwen3-8B with a public EAGLE-3 head and Qwen3-0.6B on one GPU of 80 GB: docs/collect_qwen3_8b.sh PROMPTS.jsonl...
set -eu
exec apexsim collect --target Qwen/Qwen3-8B \
    --methods ngram,suffix,draft_model,eagle3 \
    --draft-model Qwen/Qwen3-0.6B --eagle3-model Tengyunw/qwen3_8b_eagle3 \
    --max-tokens 512 --batch-size 32 --timing-requests 24 --timing-batches 1,4,16 \
    --out runs/qwen3-8b --prompts "$@"
