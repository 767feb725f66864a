"""LLaDA and Dream for SGLang: configs, models, short names, per-model defaults.

SGLang scans the modules of this package for ``EntryClass``, so importing the package itself must stay cheap:
nothing is imported here.
"""
