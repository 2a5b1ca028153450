"""`bapo eval`: a model on data sets, k responses to every problem, with everything kept and nothing done twice."""
