"""`python laptop.py darwin plan ...`: the command where torch is not installed, as on another system than Linux.

By another name of the platform, and without modules that it lacks; the rest of that system is not there.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
import sysconfig

import rich.console  # what a library asks of the real system is asked before
import typer.main

platform, *words = sys.argv[1:]
gone = {"torch", "numpy", "safetensors"}
if platform == "win32":
    for module, names in (
        (os, ("register_at_fork", "fork", "O_DIRECT", "O_NOFOLLOW", "O_NONBLOCK", "preadv")),
        (signal, ("SIGHUP",)),
    ):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
gone |= {"fcntl", "resource", "termios", "pwd", "grp"} if platform == "win32" else set()
find = importlib.util.find_spec


class Lacks(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in gone:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


assert all((rich.console, typer.main, sysconfig.get_config_vars()))
for name in gone & set(sys.modules):
    del sys.modules[name]
sys.meta_path.insert(0, Lacks())
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in gone else find(name, package)
sys.platform, sys.argv = platform, ["zeroshard", *words]

from zeroshard.cli.main import main  # noqa: E402

main()
