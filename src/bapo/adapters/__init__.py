"""BAPO inside other people's trainers: one module per library, each the only file that imports it.

An adapter translates names, hands the update's tokens to `bapo.core` and its bounds back; the loss stays the library's.
"""
