"""Blocks: columns of a Jacobian, kept in the smallest form that gives every product."""
