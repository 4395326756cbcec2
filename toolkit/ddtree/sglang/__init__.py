"""DDTREE for stock SGLang 0.5.17, as a plugin: no fork, no patched file.

`plugin.register` is the entry point in the group `sglang.srt.plugins`. Installed and not selected, it adds
flags and a name to choose, and changes nothing else.
"""
