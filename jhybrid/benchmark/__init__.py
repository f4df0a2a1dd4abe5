"""Commands that time whole models and single routed layers, with random weights and set routes."""
