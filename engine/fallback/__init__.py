"""Runs the model classes of the installed transformers over our pages.

    inspection           what a class needs from the engine, found without its weights
    attention_interface  attention over pages, as transformers' attention interface calls it
    fallback_model       weights, forward, head and steps, and the check that a model answers as
                         transformers alone does

Everything around the model (pages, scheduling, sampling, transfer) is the same as for the native
families. Code that ships with a model is never run.
"""
