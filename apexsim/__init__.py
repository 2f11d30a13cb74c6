"""ApexSim: replay real speculative-decoding traces, exactly, under any policy."""

from gymnasium.envs.registration import register

# By strings: nothing of the environment is imported before gym.make asks for it.
register(id="ApexSpec-v0", entry_point="envs.single:SpecEnv", vector_entry_point="envs.vector:SpecVectorEnv")
