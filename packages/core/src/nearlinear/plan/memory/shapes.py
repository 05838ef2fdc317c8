"""x"""
def vocabulary_of(config): return {"gpt2":50257,"llama":32000}[config.model.family]
