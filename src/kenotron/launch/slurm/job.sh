#!/bin/bash
{directives}

cd {folder} || exit 1
{setup}

srun {srun} \
  {command} &
ranks=$!
requeue=
trap 'requeue=yes; kill -USR1 "$ranks"' USR1 # {seconds} s before the time limit
wait "$ranks"
code=$?
if [ -n "$requeue" ]; then # the signal ended the first wait
  wait "$ranks"
  code=$?
  scontrol requeue "{requeued}"
fi
exit "$code"
