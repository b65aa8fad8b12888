"""MARS inside vLLM: a worker, a scheduler and a proposer of ours for vLLM's own engine (docs/vllm.md).

Importing this package imports no vLLM; its modules do, once `versions.require_tested` has passed.
"""
