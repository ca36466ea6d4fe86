"""Small real tasks that ship with the package: for the quickstart, for the tests, and as examples to copy.

digits     handwritten digits, classified by a small ResNet
charlm     a small GPT that predicts the next character of a text
crowd_bt   a quality scorer trained on pairwise judgements (Crowd-BT)
"""
