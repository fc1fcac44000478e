"""Loads what the processes of `stage_runs` need, once, in the server that forks them.

Transformers compiles a thousand expressions before a process loads its first model.
"""

from importlib import import_module

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

for name in (
    "mars_train.run.scratch",
    "mars_train.stage.trainer",
    "transformers.models.qwen2.modeling_qwen2",
):
    import_module(name)
get_checkpoint_conversion_mapping("qwen2")
