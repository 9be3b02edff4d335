"""`hf-striped bench`: striped attention against other layouts, measured in one run on this machine.

The layouts that it is compared with live here only.
"""
