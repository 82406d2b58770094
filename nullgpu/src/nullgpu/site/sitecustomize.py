"""Once torch starts CUDA, its operators compute (NULLGPU_COMPUTE=1), its synchronisations count
(NULLGPU_SYNCS).
"""

import importlib.util
import os
import sys


class AfterTorch:
    """Finds torch as ever, and asks it to call us when it starts CUDA."""

    inside = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.inside:
            return None
        self.inside = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.inside = False
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.cuda._lazy_call(start)

        spec.loader.exec_module = exec_module
        return spec


def start():
    if os.environ.get("NULLGPU_COMPUTE") == "1":
        from nullgpu import compute

        compute.install()
    if os.environ.get("NULLGPU_SYNCS"):
        from nullgpu import syncs

        syncs.start()


if os.environ.get("NULLGPU_DEVICES"):
    sys.meta_path.insert(0, AfterTorch())
