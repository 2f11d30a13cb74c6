"""ApexSim: replay real speculative-decoding traces, exactly, under any policy."""
