#!/bin/bash
# Written by `meshloom launch slurm`; sbatch runs it on the first node of the job.
$directives

cd $folder || exit 2
$exports
exec $command
