"""The `zeroshard` command.

main       options, help, one line for every mistake
output     what is printed, and what is said where it cannot be
config     what one run is asked to do
data       the text that a run trains on
launch     starting local ranks through torch's elastic launcher, and ending them
model      a byte-level GPT in plain PyTorch
train      one rank's training loop and journal
resume     which settings a run goes on with
demo       three runs and their comparison
question   what verify is asked, and the grid that follows
verify     plain runs, ranks, and the grid as shown
compare    verify's runs, and their first difference
reference  the training that zeroshard must equal, in plain PyTorch
plan       what a model would take, without one
simulate   what one rank of a run would hold and move
checkpoints  ckpt inspect, verify and export
difference   ckpt diff
screen     everything that is shown
"""
