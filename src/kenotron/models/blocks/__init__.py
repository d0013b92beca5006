"""The parts that families share: each is one idea, one file, plain maths."""
