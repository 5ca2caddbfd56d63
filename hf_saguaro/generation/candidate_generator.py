class SaguaroCandidateGenerator:
    pass
