"""The trainer of training loops outside of this program: gradients, steps and saved models as they are asked for, model by model."""
