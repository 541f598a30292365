"""The parts of `python tools/replay`: traffic through the coordinator core, in virtual time.

profiles  cache  loose_cache  replica a modelled replica: its times, its blocks, its steps
workload  generator                   sessions and their turns; made up from a seed
trace_files  shared_traces  jsonl     sessions read from files
decision_log                          sessions read from what a live server recorded
arrivals                              when each turn of each session is sent
routes  core_route                    who decides where a request goes: the core,
baselines  released_scoring           or something to compare it with
policies                              policies by name
simulation  figures                   one run in virtual time, and what is measured of it
experiment  table                     many runs, side by side
claims  pages  plots  looks  advice   what is made of them
calibrate                             a profile from the steps of a real engine
options  command                      the command line
"""
