"""How the models that `asyncrl.models` names come onto this machine; one file a source.

hub.py asks the Hugging Face Hub; smollm2.py and tiny.py are run as modules in a process of
their own, so that the caller never loads torch.
"""
